"""Numbers with nouns in messages."""


def plural(count: int, what: str) -> str:
    """Returns a count with its noun: `1 document`, `2,000 documents`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
