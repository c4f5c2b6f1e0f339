"""Joining the processes of a pod, and ending all of them when one ends.

JAX tells a Python program nothing when another process dies: the survivors wait in a collective
until the coordination service aborts them. So

- a thread gives a sign of life through the service's key-value store, and ends this process with
  one line when another's stopped or when another said that it failed;
- a shell that waits for this process says a line if it ends without a word: JAX aborts at once when
  process 0 is gone, and no Python code gets to run then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import jax

from common import hosts

FLAGS = ("distributed", "coordinator", "process_id", "processes", "heartbeat_timeout")
"""The flags of where a run is, not of what it is: they are no part of its config.json."""

LOST = 75
"""The exit code of a run that has lost a process: start it again, with --resume."""

_ALIVE, _END = "rlhf_jax/alive/", "rlhf_jax/end/"
_LISTENER = (  # a signal may be sent to all processes of a service or a job
    'trap "" TERM INT HUP; m=; while IFS= read -r l; do m=$l; done; '
    '[ -z "$m" ] || printf "%s\\n" "$m" >&2'
)


@dataclasses.dataclass(frozen=True)
class _Pod:
    """What this process knows of the others."""

    index: int
    names: tuple[str, ...]
    client: Any
    timeout: int
    watch: _Watch
    last_words: _LastWords


_pod: _Pod | None = None
_resume = ""  # how the run goes on, once there is something to go on with


def join(config: Any) -> None:
    """Join the other processes if the flags or the environment say so; before JAX has devices.

    Args:
      config: a script's flags.

    Raises:
      ValueError: flags that do not fit, or processes that do not meet.
    """
    global _pod
    asked = _asked(config)
    if asked is None:
        return
    last_words = _LastWords()
    try:
        _initialize(asked, config.heartbeat_timeout)
    except BaseException:
        last_words.take_back()
        raise
    names = tuple(hosts.exchange(socket.gethostname()))
    index = jax.process_index()
    watch = _Watch(_client(), index, names, config.heartbeat_timeout, last_words)
    _pod = _Pod(index, names, watch.client, config.heartbeat_timeout, watch, last_words)
    _prepare()
    watch.start()


def can_resume(folder: Any) -> None:
    """Tell the messages which run this is."""
    global _resume
    _resume = f" with --resume {folder}"
    _prepare()


def _prepare() -> None:
    """What is said if this process ends and no line of its own comes before."""
    if _pod is not None:
        other = f"process 0 ({_pod.names[0]})" if _pod.index else "another process"
        _pod.last_words.say(
            f"error: {hosts.own_name()} was ended from outside: killed, or by JAX because {other} "
            f"is gone; look at the other logs, and start all again{_resume}"
        )


def leave() -> None:
    """Wait until all processes are done; then nobody is missed."""
    global _pod
    if _pod is None:
        return
    hosts.exchange("done")
    _pod.watch.stop()
    jax.distributed.shutdown()
    _pod.last_words.take_back()
    _pod = None


def alone() -> bool:
    """Whether this is a run of one process."""
    return _pod is None


def signed(line: str) -> str:
    """A line for the terminal; on a pod it says which process speaks."""
    if _pod is None:
        return line
    return f"{line} [{hosts.own_name()}]"


def await_verdict(error: BaseException) -> None:
    """Where a collective failed, wait for the watch to name the process that is gone and to end."""
    own = isinstance(error, SystemExit) or "RESOURCE_EXHAUSTED" in str(error)
    if _pod is not None and not own:
        time.sleep(_pod.timeout + 5)


def abandon(code: int, line: str) -> None:
    """End this process and tell the others why; returns only where there are no others."""
    if _pod is None:
        return
    _pod.watch.stop()
    _pod.last_words.take_back()
    _end(_pod.client, _pod.index, len(_pod.names), code, f"{hosts.own_name()} failed: {line}")


def _asked(config: Any) -> dict[str, Any] | None:
    """The arguments of ``jax.distributed.initialize``; None for a run of one process."""
    if not hasattr(config, "distributed"):
        return None
    coordinator = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    index = _number(config.process_id, "--process-id", "JAX_PROCESS_ID")
    count = _number(config.processes, "--processes", "JAX_NUM_PROCESSES")
    if not config.distributed and coordinator is None and index is None and count is None:
        return None
    if not config.heartbeat_timeout >= 5:
        raise ValueError(f"--heartbeat-timeout {config.heartbeat_timeout}: it must be at least 5")
    if count is not None and count < 1:
        raise ValueError(f"--processes {count}: it must be at least 1")
    if index is not None and not 0 <= index < (count or index + 1):
        raise ValueError(
            f"--process-id {index}: {count} processes are numbered 0 to {(count or 1) - 1}"
        )
    host, _, port = (coordinator or "").rpartition(":")
    if coordinator is not None and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"--coordinator {coordinator}: write HOST:PORT, the place of process 0")
    if count == 1:
        return None
    out = dict(coordinator_address=coordinator, process_id=index, num_processes=count)
    if host in ("localhost", "127.0.0.1", "[::1]"):  # or the service would listen everywhere
        out["coordinator_bind_address"] = coordinator
    return out


def _number(given: int | None, flag: str, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text}: it must be a number, as {flag}") from None


def _initialize(asked: dict[str, Any], timeout: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        # The watch comes first and says who it is; JAX's own end of the process is the second line.
        jax.distributed.initialize(**asked, heartbeat_timeout_seconds=2 * timeout)
    except ValueError as error:
        raise ValueError(
            f"--distributed found no TPU pod and no SLURM job that says who is who ({error}); give "
            "--coordinator HOST:PORT --process-id I --processes N"
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"the processes did not meet at {asked['coordinator_address'] or 'the coordinator'} "
            f"({next(iter(str(error).splitlines()), '')[:200]}); is process 0 there, with the same "
            "--processes, and does the port reach it?"
        ) from error
    # JAX takes SIGTERM for itself; here it stops a run as Ctrl-C does (saving.Interrupts).
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _client() -> Any:
    """The coordination service's client: JAX shows it nowhere else, and Orbax takes it here too."""
    from jax._src import distributed

    return distributed.global_state.client


def _end(client: Any, index: int, count: int, code: int, line: str) -> None:
    """Leave code and line for the others and end; process 0, who keeps them, waits for ``count``.

    Without a line they are told only that this process ends.
    """
    try:
        word = f"{code} {line}" if line else ""
        client.key_value_set(f"{_END}{index}", word, allow_overwrite=True)
        until = time.monotonic() + 6
        while index == 0 and time.monotonic() < until:
            if len(client.key_value_dir_get(_END)) == count:
                break
            time.sleep(0.2)
    except Exception as error:  # the service is gone: so are the others
        print(f"the other processes could not be told: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal end would wait for the others, who wait for this process


class _Watch(threading.Thread):
    """Gives a sign of life, and looks for those of the others (process 0) or for last words."""

    def __init__(
        self,
        client: Any,
        index: int,
        names: tuple[str, ...],
        timeout: int,
        last_words: _LastWords,
    ):
        super().__init__(name="pod", daemon=True)
        self.client, self._index, self._names = client, index, names
        self._timeout, self._last_words = timeout, last_words
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def run(self) -> None:
        """Until stopped."""
        beat = 0
        while not self._stopped.wait(min(1.0, self._timeout / 6)):
            beat += 1
            try:
                key = f"{_ALIVE}{self._index}"
                self.client.key_value_set(key, str(beat), allow_overwrite=True)
                words = [word for _, word in self.client.key_value_dir_get(_END) if word]
                lost = []
                if self._index == 0 and not words:
                    signs = self.client.key_value_dir_get(_ALIVE)
                    lost = [f"{LOST} {line}" for line in self._missed(signs)]
            except Exception:  # the service is gone: JAX ends this process
                continue
            if (words or lost) and not self._stopped.is_set():
                self._last_words.take_back()
                code, _, line = (words or lost)[0].partition(" ")
                print(f"error: {line}; this process ends too", file=sys.stderr)
                line = line if self._index == 0 else ""
                _end(self.client, self._index, len(self._names) - len(lost), int(code), line)

    def _missed(self, signs: list[tuple[str, str]]) -> list[str]:
        """Who has given no new sign for too long."""
        now = time.monotonic()
        for key, sign in signs:
            if self._seen.get(key, ("", 0))[0] != sign:
                self._seen[key] = (sign, now)
        return [
            f"process {index} of {len(self._names)} ({name}) died or cannot be reached: no sign of "
            f"life for {self._timeout} s; look at its log, and start all again{_resume}"
            for index, name in enumerate(self._names)
            if now - self._seen.setdefault(f"{_ALIVE}{index}", ("", now))[1] > self._timeout
        ]


class _LastWords:
    """A shell that prints the last line it was given when this process ends without taking it back.

    It must not share this process's Ctrl-C.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _LISTENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def say(self, line: str) -> None:
        """Replace the line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the shell was killed: the run does without it
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def take_back(self) -> None:
        """Nothing is to be said."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self.say("")
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
