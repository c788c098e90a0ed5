"""The demo: what gradient accumulation and averaging really do to a gradient, measured on real gloo ranks."""

from __future__ import annotations

from accum_plugin.demo.launch import DemoError, run_demo
from accum_plugin.demo.tables import demo_tables

__all__ = ["DemoError", "demo_tables", "run_demo"]
