"""Ray: one worker for each rank. All machines have fpipe and pip install 'ray[train]'.

python examples/cluster/ray_train.py                        # starts Ray on this machine
RAY_ADDRESS=auto python examples/cluster/ray_train.py       # on a machine of a cluster
"""

import argparse
import sys
from pathlib import Path

from ray import cloudpickle
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train

cloudpickle.register_pickle_by_value(train)  # workers on other machines do not have the file


def run(settings: dict[str, int]) -> None:
    """On each worker: fpipe.init() finds the process group that Ray made."""
    train.main(**settings)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--gpus", action="store_true", help="one for each rank")
    found = options.parse_args()
    trainer = TorchTrainer(
        run,
        train_loop_config={"steps": found.steps, "ranks": found.ranks},
        scaling_config=ScalingConfig(num_workers=found.ranks, use_gpu=found.gpus),
    )
    trainer.fit()
