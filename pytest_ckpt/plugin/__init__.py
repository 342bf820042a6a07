"""All that knows pytest; this module is the entry point `pytest11: ckpt`."""

from pytest_ckpt.plugin.fixtures import (
    ckpt_acceptance,
    ckpt_load,
    ckpt_mode,
    ckpt_model,
    ckpt_plan,
    ckpt_plan_ranks,
    ckpt_save,
    ckpt_target,
    ckpt_world,
    ckpt_writer,
)
from pytest_ckpt.plugin.hooks import (
    pytest_addoption,
    pytest_benchmark_compare_machine_info,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_ignore_collect,
    pytest_report_header,
    pytest_terminal_summary,
)

__all__ = [
    "ckpt_acceptance",
    "ckpt_load",
    "ckpt_mode",
    "ckpt_model",
    "ckpt_plan",
    "ckpt_plan_ranks",
    "ckpt_save",
    "ckpt_target",
    "ckpt_world",
    "ckpt_writer",
    "pytest_addoption",
    "pytest_benchmark_compare_machine_info",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_ignore_collect",
    "pytest_report_header",
    "pytest_terminal_summary",
]
