"""--mode=export: trained weights as directories that transformers, a server or config.model.checkpoint reads."""

from __future__ import annotations

import pathlib
import shutil

from memrl_jax.models import tiny, weights
from memrl_jax.training import checkpoint, folder, learner, runs
from memrl_jax.training.settings import Settings


def export_checkpoint(
  settings: Settings, run_folder: folder.RunFolder, step: int | None
) -> pathlib.Path:
  """--mode=export: the policy of a checkpoint as a Hugging Face directory, adapters merged in.

  So is the extractor, in a directory beside it. The tokenizer goes along, so that transformers, a server
  or config.model.checkpoint reads it back.
  """
  run = runs.Run(settings)
  with checkpoint.Checkpoints(
    run_folder.checkpoints, keep=settings.train.keep, keep_every=None
  ) as saved:
    done = run.load(saved, step, memory=False)
  path = _export(run.actor, run_folder.path / f"export-{done:06d}")
  if run.extractor is not None:
    _export(run.extractor.model, run_folder.path / f"export-{done:06d}-extractor")
  run.close()
  return path


def _export(model: learner.Learner, path: pathlib.Path) -> pathlib.Path:
  source, dtype = model.parts.model.directory(), model.parts.model.dtype
  is_tiny = tiny.is_tiny(source)
  goes_along = None if is_tiny else source
  weights.save_directory(path, model.cfg, model.params, dtype=dtype, source=goes_along)
  if is_tiny:
    for file in (*tiny.tokenizer_directory().iterdir(), source / tiny.MARK):
      shutil.copy(file, path)
  return path
