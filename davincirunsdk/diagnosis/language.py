"""The language of reports: English, or Chinese where the locale is."""

from __future__ import annotations

import os

LANGUAGES = ("en", "zh")


def choose_language(lang: str | None = None) -> str:
    """Choose `en` or `zh`.

    Args:
        lang: What the user asked for; None or `auto` for the language of the locale.

    Returns:
        One of `LANGUAGES`.

    Raises:
        ValueError: It is another language.
    """
    if lang in LANGUAGES:
        return lang
    if lang not in (None, "", "auto"):
        raise ValueError(f"lang is {lang!r}; expected en, zh or auto")
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"
