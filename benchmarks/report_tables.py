"""Parts of which all sections of the results page are made."""

from collections.abc import Iterable


def provenance(stored: dict) -> list[str]:
    """Where the figures come from, in one paragraph."""
    if "commit" not in stored:
        return ["Stored without its machine and commit."]
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return [
        f"{stored['device']} (host: {stored['host']}); Python {stored['python']}, {versions}; commit"
        f" `{stored['commit']}`, {stored['date']}; `{stored['command']}`."
    ]


def table(head: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def losses(title: str, entries: list[str]) -> list[str]:
    """A list of what is ahead, under its title."""
    if not entries:
        return [f"{title}: none."]
    return [f"{title}:", "", *(f"- {entry}" for entry in entries)]


def distinct(rows: list[dict], key: str) -> list:
    """Values of a key, each once, in the order of rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.0f} %"


def span(values: Iterable[float]) -> str:
    """The least and the largest value."""
    values = list(values)
    return f"{min(values):.0f} to {max(values):.0f}"
