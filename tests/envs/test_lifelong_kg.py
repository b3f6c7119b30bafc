"""KG tasks: the seven calls on a graph that can be checked by eye, verdicts, files with their own facts."""

import json

import numpy as np
import pytest

from memrl_jax.envs import base, lifelong_graph, lifelong_kg
from memrl_jax.envs import lifelong_tasks as tasks

FAMILY = lifelong_kg.FAMILY
#       ann made f1 (1990, 80 min), f2 (2001, 95 min), f3 (1999, 95 min);  bob is in f2 and f3
TRIPLES = [
  *(("m.ann", "film.made", film) for film in ("m.f1", "m.f2", "m.f3")),
  *(("m.bob", "film.in", film) for film in ("m.f2", "m.f3")),
  ("m.ann", "person.city", "m.rome"),
  *((f"m.f{i}", "film.minutes", m) for i, m in ((1, "80"), (2, "95"), (3, "95"))),
  *((f"m.f{i}", "film.date", d) for i, d in ((1, "1990-05-01"), (2, "2001-01-01"), (3, "1999"))),
  *((f"m.f{i}", "film.star", "m.bob") for i in (2, 3)),
]
TYPES = {
  "film.made": "film", "film.in": "film", "person.city": "city", "film.star": "person",
  "film.minutes": "type.int", "film.date": "type.datetime",
}  # fmt: skip
ENTITIES = {"Ann": "m.ann", "Bob (B), actor": "m.bob"}


@pytest.fixture
def session():
  return lifelong_graph.Session(lifelong_graph.Graph(TRIPLES, TYPES), ENTITIES)


def members(session, number=-1):
  return sorted(session.variables[number].members)


def test_calls_give_relations_variables_numbers_and_extremes(session):
  assert session.call("get_relations", ["Ann"]) == "[film.made, person.city]"
  assert session.call("get_neighbors", ["Ann", "film.made"]) == "variable #0, of type film"
  assert members(session) == ["m.f1", "m.f2", "m.f3"]
  session.call("get_relations", ["Bob (B), actor"])
  session.call("get_neighbors", ["Bob (B), actor", "film.in"])
  assert session.call("intersection", ["#0", "variable #1"]) == "variable #2, of type film"
  assert members(session) == ["m.f2", "m.f3"]
  assert session.call("get_relations", ["#2"]) == "[film.star]"  # attributes are no relations
  assert session.call("get_attributes", ["#0"]) == "[film.date, film.minutes]"
  session.call("argmax", ["#0", "film.minutes"])
  assert members(session) == ["m.f2", "m.f3"]  # both share the value
  session.call("argmin", ["#0", "film.minutes"])
  assert members(session) == ["m.f1"]
  session.call("argmax", ["#0", "film.date"])
  assert members(session) == ["m.f2"]
  assert session.call("count", ["#0"]) == "variable #6, of type type.int"
  assert members(session) == ["3"]


@pytest.mark.parametrize(
  ("call", "sentence"),
  [
    (("find", ["Ann"]), "no call find"),
    (("count", ["#0", "#0"]), "takes 1 arguments, not 2"),
    (("get_relations", ["Cy"]), "neither a variable nor one of the entities Ann"),
    (("count", ["Ann"]), "is no variable"),
    (("count", ["#9"]), "no variable #9; there are: #0, #1, #2"),
    (("get_neighbors", ["#0", "film.star"]), r"call get_relations\(#0\) first"),
    (("get_neighbors", ["Ann", "film.in"]), r"has: \[film.made, person.city\]"),
    (("argmax", ["#0", "film.minutes"]), r"call get_attributes\(#0\) first"),
    (("intersection", ["#0", "#1"]), "types differ: film and city"),
    (("get_relations", ["#2"]), "can only be the final answer"),
  ],
)
def test_calls_that_cannot_be_made_say_why_and_make_nothing(session, call, sentence):
  session.call("get_relations", ["Ann"])
  for relation in ("film.made", "person.city"):
    session.call("get_neighbors", ["Ann", relation])
  session.call("count", ["#0"])
  with pytest.raises(lifelong_graph.Refused, match=sentence):
    session.call(*call)
  assert len(session.variables) == 3


@pytest.mark.parametrize(
  ("response", "action"),
  [
    ("I ask.\nAction: get_relations(Bob (B), actor)", ("get_relations", "Bob (B), actor", -1)),
    ("Action: count(#0) and Action: count(#1)", ("count", "#0", -1)),
    ("<think>Final Answer: #1</think>Action: count(#0)", ("count", "#0", -1)),
    ("Final answer: variable #12", ("", "", 12)),
    ("Action: count(#0\nbut never closed", ("count", "", -1)),
    ("Final Answer: m.f1", None),
    ("get_relations(Ann)", None),
    ("", None),
  ],
)
def test_responses_are_read_leniently(response, action):
  assert lifelong_kg.parse(response) == (action and lifelong_kg.Action(*action))


def test_arguments_are_split_at_commas_outside_names():
  split = lifelong_kg.split
  assert split("Bob (B), actor , film.in", ENTITIES) == ["Bob (B), actor", "film.in"]
  assert split("#0,film.minutes", ENTITIES) == ["#0", "film.minutes"]
  assert split("", ENTITIES) == []


@pytest.fixture
def published(tmp_path):
  """Options for a question in a file of the published schema, and the environment of it."""
  row = {"question": "What did Ann make?", "entity_dict": ENTITIES, "answer_list": ["m.f2", "m.f3"]}
  (tmp_path / "entry_dict.json").write_text(json.dumps({"0": row}))
  roles = "".join(f"some.domain {relation} {kind}\n" for relation, kind in TYPES.items())
  (tmp_path / "fb_roles").write_text(roles)
  lines = ["\t".join(triple) for triple in [*TRIPLES, ("m.ann", "not.a.role", "m.x")]]
  (tmp_path / "triples.tsv").write_text("\n".join(lines) + "\n")
  return lifelong_kg.Options(
    data=str(tmp_path / "entry_dict.json"), graph=str(tmp_path), split="all", turns=4, reward_scale=2.0
  )  # fmt: skip


def test_a_right_answer_is_paid_and_others_are_scored_by_f1(published):
  environment = FAMILY.make(published)
  first = environment.reset(3)
  assert "What did Ann make?" in first.text and "Bob (B), actor" in first.text and "m." not in first.text  # fmt: skip
  environment.step("Action: get_relations(Bob (B), actor)")
  made = environment.step("Action: get_neighbors(Bob (B), actor, film.in)")
  assert (made.done, made.reward, made.observation.text) == (False, 0.0, "variable #0, of type film")  # fmt: skip
  right = environment.step("Final Answer: #0")
  assert (right.done, right.success, right.reward, right.score) == (True, True, 2.0, 1.0)
  assert environment.retry() == first
  assert (
    environment.step("Action: get_relations(Ann)").observation.text == "[film.made, person.city]"
  )
  environment.step("Action: get_neighbors(Ann, film.made)")
  wrong = environment.step("Final Answer: #0")  # three said, two right: 2 * 2 / (3 + 2)
  assert (wrong.done, wrong.success, wrong.reward, wrong.score) == (True, False, 0.0, 0.8)


def test_mistakes_cost_a_turn_and_what_cannot_be_read_ends_the_attempt(published):
  environment = FAMILY.make(published)
  environment.reset(0)
  nothing = environment.step("Final Answer: #0")
  assert (nothing.done, nothing.valid, nothing.note) == (False, True, "error")
  assert "there are: none yet" in nothing.observation.text
  unread = environment.step("I give up")
  assert (unread.done, unread.valid, unread.action, unread.success) == (True, False, "", False)
  environment.retry()
  for turn in range(4):
    assert environment.step("Action: get_relations(Ann)").done == (turn == 3)


def test_facts_that_are_missing_are_asked_for(tmp_path):
  with pytest.raises(ValueError, match=r"holds no triples\.tsv and fb_roles"):
    lifelong_graph.load(str(tmp_path))
  (tmp_path / "fb_roles").write_text("only two\n")
  (tmp_path / "triples.tsv").touch()
  with pytest.raises(ValueError, match="a line of 2 fields"):
    lifelong_graph.load(str(tmp_path))


def test_the_solver_answers_every_generated_question_and_the_random_player_few():
  options = lifelong_kg.Options(split="all")
  environment, wins = FAMILY.make(options), {"solver": 0, "random": 0}
  number = len(tasks.tasks(lifelong_kg.SOURCE, ""))
  for name in wins:
    for seed in range(number):
      player = FAMILY.players[name](options, np.random.default_rng(seed))
      log = base.AttemptLog(0, environment.reset(seed))
      while not log.done:
        result = environment.step(player.play(base.View((), log)))
        assert result.valid
        log.steps.append(base.Step(result.action, result))
      wins[name] += log.success
  assert wins["solver"] == number and wins["random"] < number / 10
