"""The runs of a comparison side by side: a queue, and one process a device that takes from it."""

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
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.comparison.plan import Plan, Result, Run
from zoo.comparison.run import Admit, Job, Outcome, folder_of, in_order, not_run, over_before, read_result
from zoo.comparison.watch import DeviceWatch, watch_devices
from zoo.errors import UserError

CPU = "cpu"  # stands for a device; several may be asked for
PATIENCE = 60.0  # seconds that a process has to save its checkpoint in, once it is told to stop


def read_devices(text: str) -> list[str]:
    """``0,1`` as devices; ``cpu`` is one too, and may be named several times.

    Raises:
        UserError: a GPU that is not there, or is named twice.
    """
    names, count = [word.strip() for word in text.split(",")], torch.cuda.device_count()
    for name in names:
        if name != CPU and not (name.isdecimal() and int(name) < count):
            have = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0" if count else "no GPU"
            raise UserError(f"--devices {text}: there is no device '{name}'; here is {have}, and cpu")
        if name != CPU and names.count(name) > 1:
            raise UserError(f"--devices {text}: GPU {name} is named twice; two runs on it would share its memory")
    return names


def run_on_devices(
    plan: Plan,
    out: str | Path,
    devices: Sequence[str],
    *,
    watch: DeviceWatch | None = None,
    pace: Callable[[], Admit] | None = None,
) -> Outcome:
    """As :func:`zoo.comparison.run.run_plan`, with as many runs at once as there are devices.

    Every process sees its device alone (``CUDA_VISIBLE_DEVICES``). The order of starts is that of one device, and so
    are all numbers but the speeds, where runs share a host. A process that dies takes its own run with it.

    Args:
        plan, out: as there.
        devices: from :func:`read_devices`, at least one.
        watch: hears how it goes; None: a table that fills on a terminal, lines elsewhere.
        pace: makes what may leave out the runs of one device; None: all are run.

    Raises:
        UserError: as there.
    """
    folder = Path(out)
    with watch if watch is not None else watch_devices() as listener:
        lanes = [
            Lane(plan, folder, name, number, len(devices), listener, pace() if pace is not None else None)
            for number, name in enumerate(devices, start=1)
        ]
        before = _on_sigterm(_stopped) if threading.current_thread() is threading.main_thread() else None
        try:
            return in_order(plan, folder, listener.begin, lambda jobs: _share(jobs, lanes))
        except KeyboardInterrupt:
            raise SystemExit(1) from None  # as Lightning ends a run
        finally:
            for lane in lanes:
                lane.close()
            if before is not None:
                _on_sigterm(before)


def _on_sigterm(handler: Any) -> Any:
    return signal.signal(signal.SIGTERM, handler)


def _stopped(*_: Any) -> NoReturn:
    raise SIGTERMException()


def _share(jobs: Sequence[Job], lanes: Sequence[Lane]) -> list[Result]:
    """Every job by whichever lane is free; results in the order of the jobs."""
    waiting, results = deque(enumerate(jobs)), dict[int, Result]()
    errors: list[Exception] = []

    def work(lane: Lane) -> None:
        while not errors and not lane.closed:
            try:
                index, (run, known) = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = lane.take(run, known)
            except Exception as error:  # raised again by who waits for the threads
                errors.append(error)

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a join without an end would not hear a signal
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(jobs))]


class Lane:
    """One device: its process, started with its first run, and what it is told."""

    _lock = threading.Lock()  # of everybody's watch

    def __init__(
        self, plan: Plan, out: Path, name: str, number: int, lanes: int, watch: DeviceWatch, admit: Admit | None
    ):
        self.plan, self.out, self.name, self.watch, self.admit = plan, out, name, watch, admit
        self.title = f"{name} ({number})" if name == CPU and lanes > 1 else name
        self.log = out / f"device-{number}.log"
        self.environment = _environment(name, lanes)
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False

    def take(self, run: Run, known: Result | None) -> Result:
        """Run a job, unless it is over or does not fit.

        Raises:
            UserError: of what all arms share.
        """
        self._say("take", run.title, self.title)
        result = known if known is not None else over_before(self.plan, run, self.out)
        before = known is None and result is not None
        if result is None:
            reason = self.admit(run) if self.admit is not None else None
            result = not_run(run, reason) if reason is not None else self._train(run)
        self._say("over", run.title, result.status, result.score, before=before)
        return result

    def close(self) -> None:
        """End the process; one that trains saves its checkpoint first."""
        self.closed = True
        process = self.process  # the lane's own thread forgets it as soon as it hears the end
        if process is None:
            return
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        self._forget()

    def _forget(self) -> int:
        """Wait for the end of the process, close what led to it, and give its status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        with suppress(BrokenPipeError):
            process.__exit__(None, None, None)
        return process.wait()

    def _say(self, what: str, *words: Any, **more: Any) -> None:
        with self._lock:
            getattr(self.watch, what)(*words, **more)

    def _train(self, run: Run) -> Result:
        job = {"arm": self.plan.arms.index(run.arm), "seed": run.seed}
        job |= {"learning_rate": run.learning_rate, "factor": run.factor}
        try:
            process = self.process or self._open()
            self._send(process, json.dumps(job).encode() + b"\n")
            for line in process.stdout or ():
                event = json.loads(line)
                if event["event"] == "step":
                    self._say("progress", run.title, event["done"], event["whole"], event["figures"])
                elif event["event"] == "refused":
                    raise UserError(event["message"])
                elif event["event"] == "end":
                    stored = (folder_of(run, self.out) / "status.json").read_text(encoding="utf-8")
                    return read_result(run.arm, json.loads(stored))
        except BrokenPipeError:
            pass  # it is dead, and its status says of what
        status = self._forget()
        if self.closed:
            raise RuntimeError(f"{self.title} was closed while it trained {run.title}")
        return not_run(run, f"its process on {self.title} ended with {status}; its last words: {self.log}", "failed")

    def _open(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "zoo.comparison.worker"]
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
        content = pickle.dumps((self.plan, str(self.out)))
        self._send(process, f"{len(content)}\n".encode() + content)
        return process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
        if process.stdin is None:
            raise RuntimeError("a lane's process has no input")
        process.stdin.write(content)
        process.stdin.flush()


def _environment(name: str, lanes: int) -> dict[str, str]:
    """What a device's process sees."""
    if name == CPU:
        threads = str(max(1, (os.cpu_count() or 1) // lanes))
        return {"OMP_NUM_THREADS": threads, **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Devices are counted among those that this process sees.
    visible = [word.strip() for word in seen.split(",")] if seen else None
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible[int(name)] if visible is not None else name}
