"""Start an experiment as two processes of four CPU devices, and read what they said."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(*command, devices=4, **variables):
    """One process that takes its place from the environment."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "experiments")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: str(value) for name, value in variables.items()},
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pair(*command, **variables):
    """Two processes that meet at a free port."""
    where = dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}", JAX_NUM_PROCESSES=2)
    return [start(*command, **where, JAX_PROCESS_ID=index, **variables) for index in range(2)]


def ends(processes, timeout=300):
    """Exit code, output and errors of each; none is left running."""
    try:
        found = [process.communicate(timeout=timeout) for process in processes]
        return [(p.returncode, *said) for p, said in zip(processes, found, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def errors(text):
    """The lines that are meant for people."""
    return [line for line in text.splitlines() if line.startswith("error: ")]
