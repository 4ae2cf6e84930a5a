"""Runs side by side: one queue, and processes that take from it, each with one device."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.comparison.allowance import Allowance
from zoo.comparison.plan import Plan, Result, Run
from zoo.comparison.run import Job, Outcome, folder_of, in_order, not_run, over_before, read_result, starved
from zoo.comparison.watch import DeviceWatch, watch_devices
from zoo.errors import UserError

CPU = "cpu"  # stands for a device
PATIENCE = 60.0  # seconds that a process has to save its checkpoint in, once it is told to stop


def read_devices(text: str) -> list[str]:
    """``0,1`` as devices; ``cpu`` is one too. A device that is named several times trains as many runs at once.

    Raises:
        UserError: a GPU that is not there.
    """
    names, count = [word.strip() for word in text.split(",")], torch.cuda.device_count()
    for name in names:
        if name != CPU and not (name.isdecimal() and int(name) < count):
            have = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0" if count else "no GPU"
            raise UserError(f"--devices {text}: there is no device '{name}'; here is {have}, and cpu")
    return [name if name == CPU else str(int(name)) for name in names]


def run_on_devices(
    plan: Plan,
    out: str | Path,
    devices: Sequence[str],
    *,
    watch: DeviceWatch | None = None,
    allowance: Allowance | None = None,
) -> Outcome:
    """As :func:`zoo.comparison.run.run_plan`, with as many runs at once as there are devices.

    The order of starts is that of one device, and so are all numbers but the speeds.

    Args:
        plan, out, allowance: as there.
        devices: from :func:`read_devices`, at least one.
        watch: hears how it goes; None: a table that fills on a terminal, lines elsewhere.

    Raises:
        UserError: as there.
    """
    with watch if watch is not None else watch_devices() as listener, Pool(devices, out, listener) as pool:
        try:
            return pool.run(Work(plan, Path(out), allowance if allowance is not None else Allowance()))
        except KeyboardInterrupt:
            raise SystemExit(1) from None  # as Lightning ends a run


@dataclass(frozen=True, eq=False)
class Work:
    """A comparison whose runs a pool takes.

    Attributes:
        plan, out, allowance: as :func:`zoo.comparison.run.run_plan`.
        name: stands before the titles of its runs, where several comparisons share a pool.
        turn: runs of a lower one are taken before those of a higher one.
    """

    plan: Plan
    out: Path
    allowance: Allowance = field(default_factory=Allowance)
    name: str = ""
    turn: int = 0

    def title(self, title: str) -> str:
        """A run's, as watches know it."""
        return f"{self.name}: {title}" if self.name else title


class Batch:
    """Jobs that were put into the queue together, and what came of them."""

    def __init__(self, work: Work, jobs: Sequence[Job]):
        self.work, self.jobs = work, jobs
        self.results: dict[int, Result] = {}
        self.error: Exception | None = None
        self.over = threading.Event()

    def wait(self, closed: Callable[[], bool]) -> list[Result]:
        """The results in the order of the jobs; or the error that ended them, the pool's end too."""
        while not self.over.wait(0.2):  # a wait without an end would not hear a signal
            if closed():
                raise RuntimeError("the pool was closed")
        if self.error is not None:
            raise self.error
        return [self.results[index] for index in range(len(self.jobs))]


@dataclass(eq=False)
class Turn:
    """A job of a batch, in the queue or on a device.

    Attributes:
        batch, index: where its result belongs.
        room: the most runs that may share the device with it; None: any number, for it has not run out of memory.
        beside: the most that have, since it was taken.
    """

    batch: Batch
    index: int
    room: int | None = None
    beside: int = 0

    def admits(self, others: int) -> bool:
        """Whether so many may share the device with it."""
        return self.room is None or others <= self.room


class Pool:
    """Processes on devices, and the one queue that they take runs from. Several threads may give it work.

    Every process sees its device alone (``CUDA_VISIBLE_DEVICES``), begins with its first run and serves all work after
    it. One that dies takes its own run with it, and the next run begins another. Leaving the pool ends them; a run
    under way saves its checkpoint first.

    A run that finds no memory beside others stands in the queue again, until half as many share a device; nothing is
    held back for it. One that had a device for itself has failed.

    Args:
        devices: from :func:`read_devices`.
        out: a folder for what processes say in passing.
        watch: hears of every run.
    """

    def __init__(self, devices: Sequence[str], out: str | Path, watch: DeviceWatch):
        self.watch, self._lock = watch, threading.Lock()
        self._queue: deque[Turn] = deque()
        self._under_way: dict[str, list[Turn]] = {name: [] for name in devices}
        self._more = threading.Condition()
        self._closed = False
        self._handler: Any = None
        self._lanes = [Lane(self, name, number, devices, Path(out)) for number, name in enumerate(devices, start=1)]
        self._serving = [*self._lanes]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _stopped)
        for lane in self._lanes:
            threading.Thread(target=self._serve, args=(lane,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._more:
            self._closed = True
            self._queue.clear()
            self._more.notify_all()
        for lane in self._lanes:  # all are told before one is waited for: a second signal cuts that short
            lane.stop()
        for lane in self._lanes:
            lane.close()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)

    def run(self, work: Work) -> Outcome:
        """A whole comparison: its trials of learning rates, then its runs.

        Raises:
            UserError: as :func:`zoo.comparison.run.run_plan`.
        """
        return in_order(
            work.plan,
            work.out,
            lambda titles: self.say("begin", [work.title(title) for title in titles]),
            lambda jobs: self.share(work, jobs),
        )

    def share(self, work: Work, jobs: Sequence[Job]) -> list[Result]:
        """Every job by whichever process is free; results in the order of the jobs."""
        batch = Batch(work, jobs)
        if not jobs:
            return []
        with self._more:
            if self._closed:
                raise RuntimeError("the pool was closed")
            self._queue.extend(Turn(batch, index) for index in range(len(jobs)))
            self._queue = deque(sorted(self._queue, key=lambda turn: turn.batch.work.turn))
            self._more.notify_all()
        return batch.wait(lambda: self._closed)

    def _retire(self, lane: Lane) -> bool:
        """Take a lane out that gets no process; False: there is no other."""
        with self._more:
            if self._serving == [lane]:
                return False
            self._serving.remove(lane)
            return True

    def say(self, what: str, *words: Any, **more: Any) -> None:
        """Tell the watch; one thread at a time."""
        with self._lock:
            getattr(self.watch, what)(*words, **more)

    def _next(self, name: str) -> Turn | None:
        """Wait for the first job that a device has room for, and put it there; None: the pool was closed."""
        with self._more:
            here = self._under_way[name]
            while not self._closed:
                self._queue = deque(turn for turn in self._queue if turn.batch.error is None)
                if all(turn.admits(len(here)) for turn in here):
                    for turn in self._queue:
                        if turn.admits(len(here)):
                            self._queue.remove(turn)
                            self._put(turn, here)
                            return turn
                self._more.wait()
            return None

    @staticmethod
    def _put(turn: Turn, here: list[Turn]) -> None:
        here.append(turn)
        turn.beside = 0
        for each in here:
            each.beside = max(each.beside, len(here) - 1)

    def _leave(self, name: str, turn: Turn) -> None:
        """Take a job off its device."""
        with self._more:
            self._under_way[name].remove(turn)
            self._more.notify_all()

    def _put_back(self, turn: Turn, reason: str) -> None:
        batch = turn.batch
        # First: once it is in the queue, another lane may say that it takes it.
        self.say("back", batch.work.title(batch.jobs[turn.index][0].title), reason)
        with self._more:
            self._queue.appendleft(turn)
            self._more.notify_all()

    def _serve(self, lane: Lane) -> None:
        while (turn := self._next(lane.name)) is not None:
            try:
                if not self._ran(lane, turn):
                    return
            except Exception as error:  # raised again by who waits for the batch
                _fail(turn.batch, error)

    def _ran(self, lane: Lane, turn: Turn) -> bool:
        """Run a job and keep what came of it; False: the lane gets no process, and another has the job."""
        batch, (run, known) = turn.batch, turn.batch.jobs[turn.index]
        title = batch.work.title(run.title)
        reason = ""
        try:
            result, before = lane.take(batch.work, run, known, turn.room)
        except CannotBegin as error:
            reason = str(error)
            result, before = not_run(run, reason, "failed"), False
        finally:
            self._leave(lane.name, turn)
        if reason and self._retire(lane):
            self._put_back(turn, reason)
            return False
        if starved(result) and turn.beside > 0:
            turn.room = turn.beside // 2
            self._put_back(turn, f"no memory beside {turn.beside} others; tried again beside {turn.room} at most")
            return True
        self.say("over", title, result.status, result.score, before=before)
        batch.results[turn.index] = result
        if len(batch.results) == len(batch.jobs):
            batch.over.set()
        return True


class CannotBegin(Exception):
    """A lane that gets no process."""


def _fail(batch: Batch, error: Exception) -> None:
    batch.error = batch.error or error
    batch.over.set()


def _stopped(*_: Any) -> NoReturn:
    raise SIGTERMException()


class Lane:
    """One place on a device: its process, started with its first run, and what that is told."""

    def __init__(self, pool: Pool, name: str, number: int, devices: Sequence[str], out: Path):
        self.pool, self.name, self.at_once = pool, name, devices.count(name)
        self.title = f"{name} ({number})" if self.at_once > 1 else name
        self.log = out / f"device-{number}.log"
        self.environment = _environment(name, len(devices))
        self.process: subprocess.Popen[bytes] | None = None
        self.known: set[Work] = set()  # by the process
        self.closed = False

    def take(self, work: Work, run: Run, known: Result | None, room: int | None = None) -> tuple[Result, bool]:
        """Run a job, unless it is over or does not fit; and whether an earlier call had run it.

        Args:
            work, run, known: the job.
            room: the most runs that share the device with it, where these are fewer than lanes.

        Raises:
            UserError: of what all arms share.
        """
        title = work.title(run.title)
        self.pool.say("take", title, self.title)
        result = known if known is not None else over_before(work.plan, run, work.out)
        before = known is None and result is not None
        if result is None:
            reason = work.allowance.refuse()
            at_once = self.at_once if room is None else min(self.at_once, room + 1)
            result = not_run(run, reason) if reason is not None else self._train(work, run, at_once)
        return result, before

    def stop(self) -> None:
        """Tell the process to end; one that trains saves its checkpoint first."""
        self.closed = True
        process = self.process  # the lane's own thread forgets it as soon as it hears the end
        if process is not None:
            process.terminate()

    def close(self) -> None:
        """Wait for the end of a process that was told to."""
        process = self.process
        if process is None:
            return
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        self._forget()

    def _forget(self) -> int:
        """Wait for the end of the process, close what led to it, and give its status."""
        process, self.process = self.process, None
        self.known.clear()
        if process is None:
            return 0
        with suppress(BrokenPipeError):
            process.__exit__(None, None, None)
        return process.wait()

    def _train(self, work: Work, run: Run, at_once: int) -> Result:
        job = {"arm": work.plan.arms.index(run.arm), "seed": run.seed, "at_once": at_once}
        job |= {"learning_rate": run.learning_rate, "factor": run.factor, "work": id(work)}
        job |= {"allowance": work.allowance.handed()}
        process = self.process or self._open()
        with suppress(BrokenPipeError):  # it is dead: it says no more, and its status says of what
            if work not in self.known:
                content = pickle.dumps((work.plan, str(work.out)))
                self._send(process, json.dumps({"work": id(work), "bytes": len(content)}).encode() + b"\n" + content)
                self.known.add(work)
            self._send(process, json.dumps(job).encode() + b"\n")
        for line in process.stdout or ():
            event = json.loads(line)
            if event["event"] == "step":
                title = work.title(run.title)
                self.pool.say("progress", title, event["done"], event["whole"], event["figures"])
            elif event["event"] == "refused":
                raise UserError(event["message"])
            elif event["event"] == "end":
                stored = (folder_of(run, work.out) / "status.json").read_text(encoding="utf-8")
                return read_result(run.arm, json.loads(stored))
        status = self._forget()
        if self.closed:
            raise RuntimeError(f"{self.title} was closed while it trained {run.title}")
        return not_run(run, f"its process on {self.title} ended with {status}; its last words: {self.log}", "failed")

    def _open(self) -> subprocess.Popen[bytes]:
        if self.closed:
            raise RuntimeError(f"{self.title} was closed")
        words = [sys.executable, "-m", "zoo.comparison.worker"]
        try:
            with self.log.open("ab") as log:
                # A session of its own: Ctrl-C reaches this process, which lets the others save.
                process = self.process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self.environment,
                    start_new_session=True,
                )
        except OSError as error:  # no memory for it, a full disk
            raise CannotBegin(f"no process can be begun on {self.title}: {error}") from error
        if self.closed:  # while it was begun
            process.terminate()
        return process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
        if process.stdin is None:
            raise RuntimeError("a lane's process has no input")
        process.stdin.write(content)
        process.stdin.flush()


def _environment(name: str, lanes: int) -> dict[str, str]:
    """What a device's process sees."""
    shared = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // lanes))} | os.environ
    if name == CPU:
        return shared | {"CUDA_VISIBLE_DEVICES": ""}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Devices are counted among those that this process sees.
    visible = [word.strip() for word in seen.split(",")] if seen else None
    return shared | {"CUDA_VISIBLE_DEVICES": visible[int(name)] if visible is not None else name}
