"""The report about host memory and disk."""

from __future__ import annotations

from radixrt.messages import Load
from radixrt.report.page import to_html
from radixrt.report.report import Report
from radixrt.report.text import to_text


def test_each_tier_that_a_worker_has_is_shown():
    report = Report(10**6)
    report.load("plain", Load(total_pages=10, free_pages=10, steps=1))
    report.load(
        "both",
        Load(
            total_pages=10, free_pages=10, steps=1, fetched_tokens=70, host_tokens=50, disk_tokens=12_345,
            disk_bytes=2_500_000_000, disk_hits=3, disk_read_tokens=9_000, disk_read_bytes=600_000_000,
            disk_read_seconds=0.5, disk_saved_seconds=4.25, disk_written_tokens=20_000, disk_lost_tokens=7,
            disk_evicted_tokens=500, disk_early_tokens=40,
        ),
    )  # fmt: skip
    found = report.to_json()
    lines = [line.split() for line in to_text(found).splitlines()]
    assert ["worker", "both", "host", "50", "70"] in lines
    disk = ["disk", "12,345", "2.50", "3", "9,000", "1,200", "4.2", "20,000", "507", "40"]
    assert ["worker", "both", *disk] in lines
    assert not any(line[:3] in (["worker", "plain", "host"], ["worker", "plain", "disk"]) for line in lines)
    html = to_html(found)
    assert all(f'<td class="n">{cell}</td>' in html for cell in disk)
    row = next(row for row in found["workers"] if row["worker"] == "both")
    assert row["disk_early_tokens"] == 40 and row["disk_bytes"] == 2_500_000_000
