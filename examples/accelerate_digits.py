"""Train on scikit-learn's digits with Accelerate, with a mistake in it, and let the hook find it.

Run ``python examples/accelerate_digits.py`` or ``accelerate launch examples/accelerate_digits.py`` (needs the extra
``demo``). The mistake: the loss is divided by 4 here and once more by ``accelerator.backward``. Without the line that
attaches the hook, the config key ``accum_plugin: fix`` does the same.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin.accelerate import AccumulationHook


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    hook = AccumulationHook.attach(accelerator)

    pixels, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))

    for pixels, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(pixels), classes)
            accelerator.backward(loss / 4)  # the mistake: backward divides as well
            optimizer.step()
            optimizer.zero_grad()

    for finding in hook.findings:
        accelerator.print(finding.message)


if __name__ == "__main__":
    main()
