"""Train on scikit-learn's digits with Lightning, with a mistake in it, and let the callback find it.

Run ``python examples/lightning_digits.py`` (needs the extra ``demo``). The mistake: the loss is divided by 4 here
and once more by ``accumulate_grad_batches=4``.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin.lightning import AccumulationCallback


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        pixels, classes = batch
        loss = nn.functional.cross_entropy(self.layers(pixels), classes)
        return loss / 4  # the mistake: the Trainer divides as well

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    pixels, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
    plugin = AccumulationCallback()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=16))
    for finding in plugin.findings:
        print(finding.message)


if __name__ == "__main__":
    main()
