"""``accelerate launch`` with the flag in its config file: accept the key, check it, hand it to the training process."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from accum_plugin.autoload import ENVIRONMENT_VARIABLE
from accum_plugin.flag import check, from_text, to_text


def accept_key(module: ModuleType) -> None:
    """Give accelerate's config classes a field for our key, so that they read it, keep it and write it.

    accelerate takes every field of these dataclasses as a key of the file and refuses all others. In a launch, a wrong
    environment variable ends the program here, before anything has started.

    Args:
        module: ``accelerate.commands.config.config_args``, as yet imported by nobody else.
    """
    module.ClusterConfig = _with_key(module.ClusterConfig)
    module.SageMakerConfig = _with_key(module.SageMakerConfig)
    if is_launch(sys.argv):
        try:
            from_text(os.environ.get(ENVIRONMENT_VARIABLE, "off"))
        except ValueError as error:
            sys.exit(f"accelerate launch: {error}")


def is_launch(argv: Sequence[str]) -> bool:
    """Whether the command line starts a training; ``accelerate config``, ``env`` and the like do not.

    Example:
        >>> is_launch(["accelerate", "launch", "train.py"]), is_launch(["accelerate", "env"])
        (True, False)
    """
    program = PurePath(argv[0])
    if program.stem in ("accelerate", "accelerate_cli"):
        return list(argv[1:2]) == ["launch"]
    if program.stem == "trl":
        return list(argv[1:2]) != ["env"]
    return program.stem == "accelerate-launch" or program.parts[-3:] == ("accelerate", "commands", "launch.py")


def _with_key(config_class: type) -> type:
    """Extend one of accelerate's config dataclasses by the field ``accum_plugin``."""

    @dataclasses.dataclass
    class Config(config_class):  # type: ignore[misc, valid-type]
        accum_plugin: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if is_launch(sys.argv):
                _hand_over(self)

    Config.__name__, Config.__qualname__ = config_class.__name__, config_class.__qualname__
    Config.__module__, Config.__doc__ = config_class.__module__, config_class.__doc__
    return Config


def _hand_over(config: Any) -> None:
    """Move the key's value from a config just read into the environment, which every launcher passes on."""
    try:
        settings = check(config.accum_plugin)
    except ValueError as error:
        sys.exit(f"accelerate launch: in the config file, {error}")
    # An environment variable set by hand outranks the file: `ACCELERATE_ACCUM_PLUGIN=off accelerate launch ...`.
    if settings is not None:
        os.environ.setdefault(ENVIRONMENT_VARIABLE, to_text(config.accum_plugin))
    # Taken out: accelerate copies the items of every mapping in the file to its command-line arguments.
    config.accum_plugin = None
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is not None and hasattr(config, "additional_args"):
        _hand_over_to_sagemaker(config, text)


def _hand_over_to_sagemaker(config: Any, text: str) -> None:
    """Name the variable among the job's own: a SageMaker job does not inherit this environment."""
    arguments = dict(config.additional_args or {})
    arguments["environment"] = {**arguments.get("environment", {}), ENVIRONMENT_VARIABLE: text}
    config.additional_args = arguments
