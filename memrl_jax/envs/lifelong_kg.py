"""KG tasks of LifelongAgentBench: answer a question by seven calls on a graph of facts (2505.11942, knowledge_graph).

The generated questions come with their own graph. The published ones ask about Freebase, of which a folder of facts
must be given (config.env.graph); no SPARQL server is asked. The answer is a variable, and right when it holds exactly
the entities of the task; the score is the F1 of the two sets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import NamedTuple

from memrl_jax.envs import base, lifelong_graph, lifelong_kg_generated, prompting
from memrl_jax.envs import lifelong_tasks as tasks


@dataclasses.dataclass(frozen=True)
class Options(tasks.Options):
  """turns: 15 in the benchmark. graph: a folder with the facts that the tasks of `data` ask about."""

  turns: int = 15
  graph: str = ""

  def __post_init__(self):
    super().__post_init__()
    if bool(self.data) != bool(self.graph):
      raise ValueError(
        "published questions need the facts they ask about, and generated ones have their own; give both data and "
        "graph, or neither (config.env.data, config.env.graph)"
      )


class Task(NamedTuple):
  """`entities` maps names in the question to ids, `calls` are a way to the answers ("" where the file has none)."""

  name: str
  instruction: str
  skills: tuple[str, ...]
  entities: dict[str, str]
  answers: tuple[str, ...]
  calls: tuple[str, ...]


def read(name: str, row: tasks.Row) -> Task:
  """One row of the published schema; actions and skills are in its raw form only."""
  entities = {key: value for key, value in tasks.nested(row["entity_dict"]).items() if value}
  if any("#" in entity for entity in entities):
    raise ValueError("an entity with # in its name cannot be told from a variable")
  return Task(
    name=name,
    instruction=row["question"],
    skills=tuple(tasks.nested(row.get("skill_list") or ())),
    entities=entities,
    answers=tuple(map(str, tasks.nested(row["answer_list"]))),
    calls=tuple(tasks.nested(row.get("action_list") or ())),
  )


SOURCE = tasks.Source("lifelong_kg", read, lifelong_kg_generated.rows)


def graph(options: Options) -> lifelong_graph.Graph:
  """The facts of these options."""
  return lifelong_graph.load(options.graph) if options.graph else lifelong_kg_generated.world()[0]


# Actions.


class Action(NamedTuple):
  """A call with the text of its arguments, or the answer (`call` is "")."""

  call: str
  arguments: str = ""
  answer: int = -1

  @property
  def text(self) -> str:
    """As a model writes it."""
    return (
      f"Action: {self.call}({self.arguments})" if self.call else f"Final Answer: #{self.answer}"
    )


_ANSWER = re.compile(r"Final [Aa]nswer:\s*(?:[Vv]ar(?:iable)?\s*)?#(\d{1,6})")
_CALL = re.compile(r"Action:\s*(\w+)\(")


def parse(response: str) -> Action | None:
  """The answer of a response, or its first call up to the bracket that closes it; None when there is neither.

  What is inside <think> does not count.
  """
  said = response.rpartition("</think>")[2]
  answer, call = _ANSWER.search(said), _CALL.search(said)
  if answer:
    return Action("", answer=int(answer[1]))
  if call is None:
    return None
  depth, rest = 1, said[call.end() :]
  for place, letter in enumerate(rest):
    depth += {"(": 1, ")": -1}.get(letter, 0)
    if depth == 0:
      return Action(call[1], rest[:place].strip())
  return Action(call[1], "")  # never closed: a call without arguments, which is refused


def split(arguments: str, entities: dict[str, str]) -> list[str]:
  """Arguments between commas; the name of an entity may have commas itself."""
  names = sorted(map(re.escape, entities), key=len, reverse=True)
  pattern = "|".join([*(f"{name}(?=\\s*(?:,|$))" for name in names), "[^,]+"])
  found = (part.strip() for part in re.findall(pattern, arguments))
  return [part for part in found if part]


class LifelongKg(base.Seeded):
  """The environment: one attempt's variables over a graph that all share."""

  def __init__(self, options: Options):
    super().__init__(options, lambda chosen, seed: tasks.draw(SOURCE, chosen, seed), options.turns)

  def _begin(self, task: Task) -> base.Observation:
    self._session = lifelong_graph.Session(graph(self._options), task.entities)
    self._calls: set[str] = set()
    return self._observe(f"Question: {task.instruction}\nEntities: {', '.join(task.entities)}")

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = parse(response)
    text, note, score, solved = "", "", 0.0, False
    if action is None:
      note = "no action could be read in this; the attempt is over"
    else:
      try:
        if action.call:
          text = self._session.call(action.call, split(action.arguments, self._task.entities))
          self._calls.add(action.text)
        else:
          score = f1(self._session.variable(action.answer).members, frozenset(self._task.answers))
          solved = score == 1.0
      except lifelong_graph.Refused as error:
        text, note = f"This was not done: {error}.", "error"
    answered = action is not None and not action.call and not note
    self._turn += 1
    self._done = self._turn >= self.horizon or action is None or answered
    if len(text) > self._options.output_chars:
      text = f"{text[: self._options.output_chars]} ... ({len(text)} characters)"
    if self._done:
      text = "\n".join(
        filter(None, [text, f"The attempt is over: {'right' if solved else 'wrong'}."])
      )
    return base.StepResult(
      observation=self._observe(text),
      reward=self._options.reward_scale * solved,
      done=self._done,
      success=solved,
      score=score,
      valid=action is not None,
      action=action.text if action else "",
      note=note,
    )

  def _observe(self, text: str) -> base.Observation:
    state = json.dumps([self._task.name, sorted(self._calls), text])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=self._task.instruction,
      task=self._task.name,
    )


def f1(said: frozenset[str], right: frozenset[str]) -> float:
  """2 |said and right| / (|said| + |right|), 0 where nothing is right."""
  return 2 * len(said & right) / (len(said) + len(right)) if said & right else 0.0


# Prompts.


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  wording = prompting.Wording(
    rules=(
      "You answer a question from a graph of facts by calls. A variable, written #0, #1 and so on in the order in "
      "which they are made, is a set of entities. The calls are:\n"
      "get_relations(X): the relations that lead on from X, an entity of the question or a variable\n"
      "get_neighbors(X, relation): a variable with all that this relation leads to; get_relations(X) comes before\n"
      "intersection(#a, #b): a variable with what two variables of the same type share\n"
      "get_attributes(#a): the attributes (numbers, dates) of a variable\n"
      "argmax(#a, attribute), argmin(#a, attribute): a variable with the members whose attribute is highest or "
      "lowest; get_attributes(#a) comes before\n"
      "count(#a): a variable with the number of members\n"
      "What argmax, argmin and count make can only be the final answer. "
      f"You have {options.turns} turns. In each of them you either make one call, written as\n"
      "Action: get_relations(X)\nor finish, written as\nFinal Answer: #0\n"
      "A turn without one of the two forms ends the trial. The question and the facts are the same in every trial."
    ),
    request="Explain in a few words what you do, then give exactly one action in one of the two forms.",
    show=str,
  )
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


# Scripted players.


class _Player(tasks.Player):
  """Chooses whole responses."""

  def play(self, view: base.View) -> str:
    return self.choose(view.current)


def _made(step: base.Step) -> bool:
  return step.result.observation.text.startswith("variable #")


class Solver(_Player):
  """Makes the calls of the task, as far as its file has them, and answers the last variable."""

  def choose(self, attempt):
    task = tasks.find(SOURCE, self._options, attempt.initial.task)
    if len(attempt.steps) < len(task.calls):
      return f"Action: {task.calls[len(attempt.steps)]}"
    made = sum(_made(step) for step in attempt.steps)
    return Action("", answer=max(0, made - 1)).text


class Random(_Player):
  """Follows relations from where it is, or answers what it has."""

  def choose(self, attempt):
    entities = attempt.initial.text.rpartition("Entities: ")[2].split(", ")
    made = sum(_made(step) for step in attempt.steps)
    at = f"#{made - 1}" if made else entities[int(self._rng.integers(len(entities)))]
    if attempt.steps and attempt.steps[-1].result.observation.text.startswith("["):
      names = attempt.now.text.strip("[]").split(", ")
      asked = attempt.steps[-1].action.partition("(")[2].rstrip(")")
      return f"Action: get_neighbors({asked}, {names[int(self._rng.integers(len(names)))]})"
    if made and self._rng.random() < 0.5:
      return Action("", answer=made - 1).text
    return f"Action: get_relations({at})"


FAMILY = base.Family(
  name="lifelong_kg",
  options=Options,
  make=LifelongKg,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=lambda options, seed: json.dumps(tasks.draw(SOURCE, options, seed)),
)
