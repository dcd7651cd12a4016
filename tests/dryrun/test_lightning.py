"""Lightning starts its own processes and makes data loaders anew; a dry run follows both."""

from __future__ import annotations

import pytest

from peakcast.collectors.dryrun.lightning_launch import num_devices
from peakcast.doors.dryrunning import dryrun
from peakcast.timelines.timeline import Category

SCRIPT = """
import lightning, torch

class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

rows = [torch.ones(512) for _ in range(1000)]
trainer = lightning.Trainer(
    max_steps=9, accelerator="gpu", devices=2, num_nodes=2, strategy="ddp", logger=False, enable_progress_bar=False
)
trainer.fit(Network(), torch.utils.data.DataLoader(rows, batch_size=8, num_workers=2))
"""


@pytest.mark.whole
def test_a_trainer_for_several_gpus_is_followed_as_one_of_its_ranks(tmp_path):
    """Lightning gives the loader another sampler for its ranks: batches keep their 8 rows of 512."""
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = dryrun(["python", str(script)], "H100-80GB", timeout_seconds=200)
    assert found.steps == 3
    assert found.job.parallelism.data_parallel_size == 4
    steady = found.timelines["steady"]
    sizes = dict.fromkeys(steady.num_bytes[steady.categories == Category.COMMUNICATION_BUFFERS].tolist())
    assert sum(sizes) == 513 * 512 * 4  # DDP's bucket: float32 gradients of the layer
    assert 8 * 512 * 4 in steady.num_bytes.tolist()  # the batch


@pytest.mark.parametrize(
    ("devices", "number"),
    [(4, 4), ("4", 4), ([0, 2], 2), ("0,1,3", 3), ("1,", 1), ("auto", 1), (-1, 1), ("-1", 1), (None, 1), (0, 1), ([], 1)],
)
def test_devices_are_counted_as_lightning_counts_them(devices, number):
    assert num_devices(devices) == number
