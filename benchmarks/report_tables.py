"""Parts of which all sections of the results page are made."""

from collections.abc import Iterable


class Machines:
    """Letters for machines with their versions, in the order in which results name them."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}

    def letter(self, stored: dict) -> str:
        """The letter of the machine that a result is of."""
        versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
        text = f"{stored['device']}, host {stored['host']}; Python {stored['python']}, {versions}"
        return self.named.setdefault(text, chr(ord("A") + len(self.named)))

    def provenance(self, stored: dict) -> list[str]:
        """Where the figures come from, in one line."""
        if "commit" not in stored:
            return ["Stored without its machine and commit."]
        return [
            f"Machine {self.letter(stored)}; commit `{stored['commit']}`, {stored['date']};"
            f" `{stored['command']}`."
        ]

    def lines(self) -> list[str]:
        """All machines that were named."""
        return [f"- Machine {letter}: {text}." for text, letter in self.named.items()]


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
