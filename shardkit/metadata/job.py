"""OUT.partial as others see it: the names that show it, and whose work it is (job.json)."""

from __future__ import annotations

import json
from typing import Any

from shardkit.helpers.checked import checked, parse

JOB = "job.json"
LOCK = "lock"
PARTS = "parts"  # only of a conversion in parts


def job_text(job: dict[str, Any]) -> bytes:
    """Return the content of job.json."""
    return json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"


def parsed_job(text: bytes) -> dict[str, Any]:
    """Return the job in a job.json; empty if it is damaged."""
    try:
        return checked(dict[str, Any], parse(text))
    except ValueError:
        return {}
