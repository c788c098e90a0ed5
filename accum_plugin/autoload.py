"""The way in for the accelerate flag: PyTorch calls :func:`autoload` at the end of ``import torch``.

The entry point group is ``torch.backends``. Whatever such an entry point raises breaks ``import torch``, and while it
runs, accelerate may be half imported; so nothing happens here but a look at the environment and the program's name,
and, where one of them asks for it, a note to come back when accelerate's modules are there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

ENVIRONMENT_VARIABLE = "ACCELERATE_ACCUM_PLUGIN"
# Command-line programs that read accelerate's config file, and would reject our key in it.
CONFIG_READERS = ("accelerate", "trl", "transformers")


def autoload() -> None:
    """Prepare what the flag needs in this process; without a flag, return at once. Never raises."""
    try:
        raw = os.environ.get(ENVIRONMENT_VARIABLE)
        reads_config = reads_accelerate_config(sys.argv, sys.orig_argv)
        if raw or reads_config:
            _come_back(attach=bool(raw), accept_key=reads_config)
    except Exception as error:
        print(f"accum_plugin: the {ENVIRONMENT_VARIABLE} flag is off, training goes on: {error!r}", file=sys.stderr)


def _come_back(*, attach: bool, accept_key: bool) -> None:
    from accum_plugin.import_hook import when_imported

    if attach:
        when_imported("accelerate.accelerator", "Accelerator", "accum_plugin.flag:attach_to_every_accelerator")
    if accept_key:
        config = "accelerate.commands.config.config_args"
        when_imported(config, "SageMakerConfig", "accum_plugin.launching:accept_key")


def reads_accelerate_config(argv: Sequence[str], command: Sequence[str]) -> bool:
    """Whether this process is a command-line program that reads accelerate's config file.

    Args:
        argv: ``sys.argv``; its first item is ``"-m"`` while ``python -m`` imports the program's package.
        command: ``sys.orig_argv``, which names the module then.

    Example:
        >>> reads_accelerate_config(["/usr/bin/accelerate-launch", "train.py"], [])
        True
        >>> reads_accelerate_config(["train.py"], ["python", "train.py"])
        False
    """
    folder, program = os.path.split(argv[0] if argv else "")
    if os.path.normpath(folder).endswith(os.path.join("accelerate", "commands")):
        return True
    # accelerate-launch, accelerate.exe, transformers-cli; but not accelerate-my-model.py, which is a script.
    if program.split(".")[0].split("-")[0] in CONFIG_READERS and not program.endswith(".py"):
        return True
    modules = (module for flag, module in zip(command, command[1:], strict=False) if flag == "-m")
    return any(module.split(".")[0] in CONFIG_READERS for module in modules)
