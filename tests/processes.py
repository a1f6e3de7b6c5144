"""Scenarios on several processes: a test file runs itself as a script, and its tests look at what every rank saved."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import holdfast

Scenarios = dict[int, list[Callable[[int], dict]]]  # by the number of processes; each is told its rank


def work(rank: int, world: int, folder: Path, scenarios: Scenarios) -> None:
    """One process: all the scenarios of a world of this size."""
    signal.alarm(90)  # whoever hangs is ended
    torch.set_num_threads(1)
    store = f"file://{folder}/store{world}"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    torch.save({scenario.__name__: scenario(rank) for scenario in scenarios[world]}, folder / f"{rank}of{world}.pt")
    distributed.barrier()


def main(folder: Path, scenarios: Scenarios) -> None:
    """Fork the processes, so that what they import is imported once."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    for world in scenarios:
        for rank in range(world):
            if os.fork() == 0:
                try:
                    work(rank, world, folder, scenarios)
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(0)  # gloo's threads may abort an interpreter that goes down
        for _ in range(world):
            os.wait()


def gathered(tmp_path_factory, script: str, scenarios: Scenarios) -> dict:
    """What every rank found, by scenario. Run once, by whichever of pytest's workers comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / Path(script).stem
    try:
        folder.mkdir()
    except FileExistsError:
        while not (folder / "done").exists():
            time.sleep(0.1)
    else:
        paths = [str(Path(holdfast.__file__).parents[1]), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, str(folder)]
        try:
            with (folder / "log").open("w") as log:
                subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        finally:
            (folder / "done").touch()
    results = {}
    for world, each_world in scenarios.items():
        files = [folder / f"{rank}of{world}.pt" for rank in range(world)]
        assert all(file.exists() for file in files), (folder / "log").read_text()
        saved = [torch.load(file, weights_only=False) for file in files]
        results.update({s.__name__: [each[s.__name__] for each in saved] for s in each_world})
    return results
