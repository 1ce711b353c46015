"""Working ahead of the training loop in background threads."""

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from jax.sharding import Sharding

from magi_jax.data.processes import check_sharding, place

Item = TypeVar("Item")
Result = TypeVar("Result")


class Prefetch(Generic[Result]):
    """Iterator over ``function(item)`` for the items of a source, computed ahead of their use.

    Results come in the order of the source however many workers there are. At most ``depth + 1``
    items are ahead of the consumer. An exception of the source or of the function is raised where
    its result would have come, and ends the iteration. Use it as a context manager, or call
    `close`, to stop early.

    Planning is NumPy and compiled code in turn, and threads take turns at the former. A pipeline that
    needs more than a few threads give, or that also decodes or tokenises, is better off in the worker
    processes of a data-loading library.
    """

    def __init__(
        self,
        source: Iterable[Item],
        function: Callable[[Item], Result],
        *,
        depth: int = 2,
        workers: int = 1,
        sharding: Sharding | None = None,
    ):
        """Starts working at once.

        Args:
            source: items; read in one background thread.
            function: what to compute for each item.
            depth: results that may wait, at least 1.
            workers: threads that run ``function``, at least 1.
            sharding: how results are sent to the devices (`place`), in the same threads; None
                leaves them on the host.
        """
        if depth < 1 or workers < 1:
            raise ValueError(f"depth and workers must be at least 1, got {depth=} {workers=}")
        if sharding is not None:
            check_sharding(sharding)
            function = functools.partial(_then_place, function, sharding)
        self._results: queue.Queue[Future[Result] | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="magi_jax_prefetch")
        self._reader = threading.Thread(target=self._read, args=(source, function), daemon=True)
        self._reader.start()

    def _read(self, source: Iterable[Item], function: Callable[[Item], Result]) -> None:
        try:
            for item in source:
                if not self._put(self._pool.submit(function, item)):
                    return
            self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            failed: Future[Result] = Future()
            failed.set_exception(error)
            self._put(failed)

    def _put(self, entry: Future[Result] | None) -> bool:
        """Waits for room; False when the consumer has stopped."""
        while not self._stopped.is_set():
            try:
                self._results.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _take(self) -> Future[Result] | None:
        """Waits for the next result; None when there is none any more, or nobody makes it."""
        while not self._stopped.is_set():
            try:
                return self._results.get(timeout=0.1)
            except queue.Empty:
                continue
        return None

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        entry = self._take()
        if entry is None:
            self.close()
            raise StopIteration
        try:
            return entry.result()
        except CancelledError:  # closed by another thread before its turn came
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops the background threads; results that wait are dropped."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Prefetch[Result]":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _then_place(function: Callable[[Any], Any], sharding: Sharding, item: Any) -> Any:
    return place(function(item), sharding)
