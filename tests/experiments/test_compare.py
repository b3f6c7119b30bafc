"""The table over seeds, against numbers worked out by hand."""

import json

from experiments import compare


def write(folder, seed, gamma, final, experiment="lamer_darkroom", updates=40):
  folder.mkdir()
  config = {
    "experiment": experiment,
    "variant": "laptop",
    "seed": seed,
    "train": {"updates": updates},
    "credit": {"gamma": gamma},
  }
  (folder / "config.json").write_text(json.dumps(config))
  lines = [
    {"step": step, "label": label, "arms": {"memory": {"pass": list(passes)}}}
    for step, label, passes in (
      (0, "start", (0.1, 0.1)),
      (40, "final", final),
      (40, "eval", (1, 1)),
    )
  ]
  (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(folder)


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path, capsys):
  folders = [
    write(tmp_path / "a", 1, 0.9, (0.3, 0.8)),
    write(tmp_path / "b", 0, 0.9, (0.3, 0.9)),
    write(tmp_path / "c", 0, 0.0, (0.3, 0.5)),
    write(tmp_path / "d", 0, 0.9, (0.2, 0.4), experiment="gigpo_darkroom"),
  ]
  assert compare.main(folders) == 0
  lines = capsys.readouterr().out.splitlines()
  # mean (.8 + .9) / 2; standard error = (.1 / sqrt 2) / sqrt 2 = .05
  assert lines[2:] == [
    "| lamer_darkroom-laptop credit.gamma=0.9 | memory | 0 1 | 0.300 ± 0.000 | 0.850 ± 0.050 |",
    "| lamer_darkroom-laptop credit.gamma=0.0 | memory | 0 | 0.300 ± ? | 0.500 ± ? |",
    "| gigpo_darkroom-laptop | memory | 0 | 0.200 ± ? | 0.400 ± ? |",
  ]


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
  assert compare.main([str(tmp_path)]) == 2
  assert str(tmp_path) in capsys.readouterr().err


def test_a_run_that_is_not_finished_is_not_in_the_table(tmp_path, capsys):
  assert compare.main([write(tmp_path / "a", 0, 0.9, (0.3, 0.8), updates=80)]) == 2
  assert "no evaluation after update 80" in capsys.readouterr().err
