"""Numbers in sentences."""


def plural(count: int, what: str) -> str:
    """Returns how many there are of something: `1 document`, `2,000 documents`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
