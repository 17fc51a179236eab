"""The cache-hit-rate report: which prompt tokens were reused, which were not and why, compared with an infinite cache.

router core --arrived, finished, load--> Report --to_json--> HTTP, ZMQ, `radixrt report` --to_text--> terminal
                                                --to_html--> browser
                                                --router.server.prometheus--> Prometheus
"""

from radixrt.report.page import to_html
from radixrt.report.report import Report
from radixrt.report.text import to_text

__all__ = ["Report", "to_html", "to_text"]
