"""Reading YAML of others, within bounds."""

from __future__ import annotations

import re
from typing import Any

from shardkit.helpers.extras import extra


def parse_yaml(text: str, name: str, what: str) -> Any:
    """Return the value of a YAML document. Raises ValueError that says why there is none.

    Raises MissingLibraryError if PyYAML is not installed: `what` needs it, the extra `name` has it.
    """
    with extra(name, what):
        import yaml  # type: ignore[import-untyped]

    # In base 60, as YAML reads 1:59:59, that takes minutes.
    if re.search(r"(?<![\d:_])[\d:_]{1000}", text):
        raise ValueError("a number of over 1,000 digits")
    try:
        # Not with libyaml: deeply nested brackets crash the process.
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
