"""Every notebook runs as it is stored, away from the checkout, and is stored without outputs."""

import pathlib
import subprocess
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROBE = "import sys, memrl_jax\nprint(sys.executable, memrl_jax.__file__, sep='\\n')"


def read(path):
  return nbformat.read(path, as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def names(paths):
  return [path.stem for path in paths]


def test_there_are_notebooks():
  assert "lamer_darkroom" in names(NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_stored_notebook_is_valid_and_carries_no_outputs(path):
  notebook = read(path)
  nbformat.validate(notebook)
  assert notebook.metadata.kernelspec.name == "python3"
  for cell in code_cells(notebook):
    assert cell.outputs == [] and cell.execution_count is None, cell.source


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_notebook_runs(path, tmp_path, monkeypatch):
  """In this interpreter, on this checkout's code, in an empty folder; the kernel inherits os.environ."""
  monkeypatch.setenv("MEMRL_NOTEBOOK_UPDATES", "2")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # no kernels of the user's own
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as a reader has
  monkeypatch.delenv("MPLBACKEND", raising=False)
  notebook = read(path)
  notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
  work = tmp_path / "work"
  work.mkdir()
  nbclient.NotebookClient(
    notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(work)}}
  ).execute()  # raises CellExecutionError with the cell and its traceback

  *cells, probe = code_cells(notebook)
  interpreter, package = probe.outputs[0].text.split()
  assert interpreter == sys.executable
  assert pathlib.Path(package).is_relative_to(ROOT)
  shown = [output for cell in cells for output in cell.outputs if "data" in output]
  assert any("image/png" in output.data for output in shown)
  assert not list(work.iterdir()), "a notebook left files beside itself"


def set_up(folder):
  """Runs the first cell of the LaMer notebook in `folder`, in a Python that has no packages."""
  first = code_cells(read(ROOT / "notebooks" / "lamer_darkroom.ipynb"))[0].source
  command = [sys.executable, "-I", "-S", "-c", f"{first}\nprint(root)"]
  return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "notebooks"], ids=["root", "notebooks"])
def test_set_up_finds_the_checkout(folder):
  done = set_up(folder)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == str(ROOT)


def test_set_up_without_code_or_address_says_what_to_do(tmp_path):
  done = set_up(tmp_path)
  assert done.returncode == 1
  assert done.stderr.strip().endswith("set REPOSITORY, or open this notebook in a checkout")
