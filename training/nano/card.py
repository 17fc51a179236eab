"""The model card: card.md, with the figures of the training's log and of the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixrt.config import NANO
from training.nano.score import Share

TEMPLATE = Path(__file__).with_name("card.md")


def write(results: Path, folder: Path = NANO) -> None:
    """FOLDER/README.md, from training/nano/card.md, FOLDER/training.jsonl and an evaluation's JSON."""
    text = fill(json.loads(results.read_text()), read_log(folder / "training.jsonl"))
    (folder / "README.md").write_text(text)


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(results: dict[str, Any], log: list[dict[str, Any]]) -> str:
    facts = {
        **training(log),
        "curve": curve(log),
        "pages": results.get("kv_cache_dtype", "an endpoint's own choice"),
        "json": "held to its schema" if results["constrained"] else "not held to its schema",
        "table": accuracy_table(results["rows"]),
    }
    text = TEMPLATE.read_text()
    for key, value in facts.items():
        text = text.replace("{" + key + "}", value)
    return text


def training(log: list[dict[str, Any]]) -> dict[str, str]:
    """minutes and tokens of all runs in the log, and a line about each: from "start" to "exported"."""
    seconds = tokens = 0.0
    lines: list[str] = []
    for entry in log:
        if entry["event"] == "start":
            start = entry
        if entry["event"] == "exported":
            steps = entry["step"] - start["step"]
            seconds += entry["seconds"]
            tokens += steps * start["tokens_a_step"]
            begins = "with the weights of the one before" if start["init"] or start["step"] else "with random weights"
            lines.append(
                f"- {entry['seconds'] / 60:.1f} minutes, {steps:,} steps of {start['tokens_a_step']:,} tokens, {begins}"
            )
    return {"minutes": f"{seconds / 60:.0f}", "tokens": f"{tokens / 1e6:,.0f} million", "runs": "\n".join(lines)}


CURVE = (("recall", "2048"), ("tools", "3"), ("tools", "two"), ("arithmetic", "2"), ("choose", "sum"), ("json", "6"))


def curve(log: list[dict[str, Any]]) -> str:
    """Markdown: a line for each check of a log: minutes, the loss of answers since the check before, nats a token, the
    mean of all kinds, and the share of evaluation items that are right token for token, percent."""
    tasks = " | ".join(" ".join(task) for task in CURVE)
    lines = [f"| minutes | loss | {tasks} |", "|" + "---|" * (2 + len(CURVE))]
    losses: list[float] = []
    for entry in log:
        if entry["event"] == "step":
            losses += [sum(entry["loss"].values()) / len(entry["loss"])]
        if entry["event"] == "check":
            right = [f"{100 * entry['exact'][kind][tag]:.0f}" for kind, tag in CURVE]
            loss = f"{sum(losses) / len(losses):.3f}" if losses else ""
            lines.append(f"| {entry['seconds'] / 60:.1f} | {loss} | " + " | ".join(right) + " |")
            losses = []
    return "\n".join(lines)


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each kind and tag."""
    lines = ["| task | items | right, % (95% interval) | wanted |", "|---|---|---|---|"]
    for row in rows:
        wanted = f"{row['target']}" if row["target"] else ""
        lines.append(
            f"| {row['kind']} {row['tag']} | {row['items']} | {Share(row['right'], row['items']).shown} | {wanted} |"
        )
    return "\n".join(lines)
