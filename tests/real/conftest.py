"""With MEMRL_REAL=require a skipped test fails: where all is installed, nothing may be left out quietly."""

import os

import pytest

REQUIRED = os.environ.get("MEMRL_REAL", "") == "require"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
  outcome = yield
  report = outcome.get_result()
  if REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
    report.outcome, reason = "failed", report.longrepr
    report.longrepr = f"skipped, where nothing may be (MEMRL_REAL=require): {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
  outcome = yield
  report = outcome.get_result()
  if REQUIRED and report.skipped:
    report.outcome, reason = "failed", report.longrepr
    report.longrepr = f"skipped, where nothing may be (MEMRL_REAL=require): {reason}"
