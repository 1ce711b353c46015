"""What the examples show while they run and when they are done."""

import sys
import time
from pathlib import Path

BAR_WIDTH = 24
LINES_WITHOUT_TERMINAL = 10


class Progress:
    """A progress bar on one line of a terminal; elsewhere a line for every tenth of the steps."""

    def __init__(self, steps: int, tokens_per_step: int):
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.losses: list[float] = []
        self.start = time.monotonic()
        self.on_terminal = sys.stdout.isatty()

    def update(self, loss: float) -> None:
        """Shows one more step. Time is counted from the end of the first step, which compiles."""
        self.losses.append(loss)
        done = len(self.losses)
        if done == 1:
            self.start = time.monotonic()
            print(f"  step 1/{self.steps}  loss {loss:.3f}", flush=True)
            return
        seconds_per_step = (time.monotonic() - self.start) / (done - 1)
        filled = BAR_WIDTH * done // self.steps
        line = (
            f"  [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] step {done}/{self.steps}"
            f"  loss {loss:.3f}  {self.tokens_per_step / seconds_per_step:,.0f} tokens/s"
            f"  {seconds_per_step * (self.steps - done):.0f} s left"
        )
        if self.on_terminal:
            print(f"\r\033[K{line}", end="", flush=True)
        elif done == self.steps or done % max(self.steps // LINES_WITHOUT_TERMINAL, 1) == 0:
            print(line, flush=True)

    def finish(self) -> None:
        """Ends the line of the bar."""
        if self.on_terminal:
            print()


def plot_losses(losses: list[float], path: Path) -> None:
    """Writes the loss curve."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
