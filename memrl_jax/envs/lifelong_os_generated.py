"""Generated OS tasks in the schema of LifelongAgentBench's os_interaction: 32 kinds of task, in names drawn at random.

No check passes on a machine that was only prepared. Everything that a kind needs is in Debian's and Ubuntu's
smallest systems.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

EACH = 13  # tasks of every kind

_USERS = "ana ben cleo dirk elif femi gus hana ivo jada kofi lena milo nora oskar rui sven tara uma"
_GROUPS = "devs ops web audit design finance backup lab press sales"
_FOLDERS = "reports archive inbox drafts samples exports photos ledger notes plans"
_WORDS = "alpha bravo cedar delta ember fjord grove haven iris jade kite lotus maple nova"
_FILES = "list summary index draft table journal memo config input record"


class Kind(NamedTuple):
  """Texts with {names} to fill in. `check` is a condition of bash."""

  instruction: str
  prepare: str
  truth: str
  check: str
  skills: str


# {u}, {v} users, {g}, {h} groups, {d}, {e} folders, {f} a file's name, {w}, {x}, {y} words, {n} and {m} small numbers,
# {path} a folder that is made first.
KINDS = (
  Kind("Create the group {g} and a user {u} with a home directory, whose primary group is {g}.", "",
       "groupadd {g} && useradd -m -g {g} {u}", '[ "$(id -gn {u})" = {g} ] && [ -d /home/{u} ]', "groupadd useradd"),
  Kind("Create a user {u} with /bin/sh as login shell and {path}/{u} as home directory, which must exist.", "mkdir -p {path}",
       "useradd -m -d {path}/{u} -s /bin/sh {u}",
       'getent passwd {u} | grep -q ":{path}/{u}:/bin/sh$" && [ -d {path}/{u} ]', "useradd"),
  Kind("There is a user {u} and a group {g}. Make {u} a member of {g} and keep the other memberships.",
       "groupadd {h}; groupadd {g}; useradd -G {h} {u}", "usermod -aG {g} {u}",
       'id -nG {u} | grep -qw {g} && id -nG {u} | grep -qw {h}', "usermod"),
  Kind("Take the user {u} out of the group {g}; the account stays.", "groupadd {g}; useradd -G {g} {u}",
       "gpasswd -d {u} {g}", 'id {u} > /dev/null && ! id -nG {u} | grep -qw {g}', "gpasswd"),
  Kind("Make /bin/sh the login shell of {u}.", "useradd -s /bin/bash {u}", "chsh -s /bin/sh {u}",
       'getent passwd {u} | grep -q ":/bin/sh$"', "chsh"),
  Kind("The password of {u} shall expire {n}0 days after each change.", "useradd {u}", "chage -M {n}0 {u}",
       '[ "$(getent shadow {u} | cut -d: -f5)" = {n}0 ]', "chage"),
  Kind("Rename the user {u} to {v}.", "useradd {u}", "usermod -l {v} {u}",
       'id {v} > /dev/null && ! id {u} 2> /dev/null', "usermod"),
  Kind("Give {path} and everything in it to the user {u}.", "useradd {u}; mkdir -p {path}/{e}; touch {path}/{e}/{f}.txt",
       "chown -R {u} {path}", '[ -z "$(find {path} ! -user {u})" ]', "chown"),
  Kind("Give {path} and everything in it to the group {g}; the owner stays.",
       "groupadd {g}; useradd {u}; mkdir -p {path}/{e}; touch {path}/{e}/{f}.txt; chown -R {u} {path}",
       "chgrp -R {g} {path}", '[ -z "$(find {path} ! -group {g})" ] && [ -z "$(find {path} ! -user {u})" ]', "chgrp"),
  Kind("Only the owner may read and write {path}/{f}.txt, its group may read it, and nobody else may do anything.",
       "mkdir -p {path}; touch {path}/{f}.txt; chmod 777 {path}/{f}.txt", "chmod 640 {path}/{f}.txt",
       '[ "$(stat -c %a {path}/{f}.txt)" = 640 ]', "chmod"),
  Kind("Make {path} a folder that is shared by the group {g}: it belongs to {g}, the group may write in it, others may "
       "do nothing, and new files in it belong to {g}.", "groupadd {g}; mkdir -p {path}",
       "chgrp {g} {path} && chmod 2770 {path}", '[ "$(stat -c %G:%a {path})" = {g}:2770 ]', "chgrp chmod"),
  Kind("Make every file that ends in .sh below {path} executable for its owner, and no other file.",
       "mkdir -p {path}/{e}; touch {path}/{w}.sh {path}/{e}/{x}.sh {path}/{f}.txt; chmod -R u-x,g-x,o-x,u+X {path}/*",
       "find {path} -name '*.sh' -exec chmod u+x {{}} +",
       '[ -x {path}/{w}.sh ] && [ -x {path}/{e}/{x}.sh ] && ! [ "$(stat -c %a {path}/{f}.txt)" = 744 ]', "find chmod"),
  Kind("Make the folders {w}, {x} and {y} in {path}, each with a folder {e} in it.", "mkdir -p {path}",
       "mkdir -p {path}/{w}/{e} {path}/{x}/{e} {path}/{y}/{e}",
       '[ -d {path}/{w}/{e} ] && [ -d {path}/{x}/{e} ] && [ -d {path}/{y}/{e} ]', "mkdir"),
  Kind("Copy the folder {path} with all that is in it to /srv/{e}.",
       "mkdir -p {path}/{w}; echo {x} > {path}/{w}/{f}.txt; touch {path}/.{y}", "cp -r {path} /srv/{e}",
       'diff -r {path} /srv/{e} > /dev/null && [ -e {path}/.{y} ]', "cp"),
  Kind("Move all files that end in .log from {path} to /srv/{e}, which does not exist yet.",
       "mkdir -p {path}; touch {path}/{w}.log {path}/{x}.log {path}/{f}.txt", "mkdir /srv/{e} && mv {path}/*.log /srv/{e}/",
       '[ "$(ls /srv/{e} | wc -l)" = 2 ] && [ "$(ls {path})" = {f}.txt ]', "mkdir mv"),
  Kind("Delete all files that end in .tmp anywhere below {path} and nothing else.",
       "mkdir -p {path}/{e}; touch {path}/{w}.tmp {path}/{e}/{x}.tmp {path}/{e}/{f}.txt {path}/tmp",
       "find {path} -name '*.tmp' -delete",
       '[ -z "$(find {path} -name "*.tmp")" ] && [ -e {path}/{e}/{f}.txt ] && [ -e {path}/tmp ]', "find"),
  Kind("Delete the folder {path}/{e} with all that is in it; {path} stays.", "mkdir -p {path}/{e}/{w}; touch {path}/{e}/{w}/{f}",
       "rm -r {path}/{e}", '[ -d {path} ] && ! [ -e {path}/{e} ]', "rm"),
  Kind("Make /srv/{w} a symbolic link to {path}/{f}.txt.", "mkdir -p {path}; touch {path}/{f}.txt",
       "ln -s {path}/{f}.txt /srv/{w}", '[ "$(readlink /srv/{w})" = {path}/{f}.txt ]', "ln"),
  Kind("Make {path}/{w} a second name (a hard link) of {path}/{f}.txt.", "mkdir -p {path}; echo {x} > {path}/{f}.txt",
       "ln {path}/{f}.txt {path}/{w}", '[ {path}/{w} -ef {path}/{f}.txt ] && ! [ -L {path}/{w} ]', "ln"),
  Kind("Make the empty files {w}.txt, {x}.txt and {y}.txt in {path}.", "mkdir -p {path}",
       "cd {path} && touch {w}.txt {x}.txt {y}.txt", '[ -f {path}/{w}.txt ] && [ -f {path}/{x}.txt ] && [ -f {path}/{y}.txt ]',
       "cd touch"),
  Kind("Write the one line {w} {x} {y} to {path}/{f}.txt.", "mkdir -p {path}", "echo {w} {x} {y} > {path}/{f}.txt",
       '[ "$(cat {path}/{f}.txt)" = "{w} {x} {y}" ]', "echo"),
  Kind("Append the line {w} to both {path}/{f}.txt and {path}/{e}.txt; what is there stays.",
       "mkdir -p {path}; echo {x} > {path}/{f}.txt; echo {y} > {path}/{e}.txt",
       "echo {w} | tee -a {path}/{f}.txt {path}/{e}.txt > /dev/null",
       '[ "$(cat {path}/{f}.txt)" = "{x}\n{w}" ] && [ "$(cat {path}/{e}.txt)" = "{y}\n{w}" ]', "echo tee"),
  Kind("Replace every {w} in {path}/{f}.txt by {x}.", "mkdir -p {path}; printf '{w} {y}\\n{y} {w} {w}\\n' > {path}/{f}.txt",
       "sed -i s/{w}/{x}/g {path}/{f}.txt", '[ "$(cat {path}/{f}.txt)" = "{x} {y}\n{y} {x} {x}" ]', "sed"),
  Kind("Delete the lines with {w} from {path}/{f}.txt.", "mkdir -p {path}; printf '{x}\\n{w} {y}\\n{y}\\n' > {path}/{f}.txt",
       "sed -i /{w}/d {path}/{f}.txt", '[ "$(cat {path}/{f}.txt)" = "{x}\n{y}" ]', "sed"),
  Kind("Write line {n} of {path}/{f}.txt, and only it, to {path}/{w}.txt.", "mkdir -p {path}; seq 100 120 > {path}/{f}.txt",
       "sed -n {n}p {path}/{f}.txt > {path}/{w}.txt", '[ "$(cat {path}/{w}.txt)" = $((99 + {n})) ]', "sed"),
  Kind("{path}/{f}.csv has lines of the form name,number. Write the sum of the numbers to {path}/{w}.txt.",
       "mkdir -p {path}; printf '{x},{n}\\n{y},{m}\\n{w},7\\n' > {path}/{f}.csv",
       "awk -F, '{{s += $2}} END {{print s}}' {path}/{f}.csv > {path}/{w}.txt",
       '[ "$(cat {path}/{w}.txt)" = $(({n} + {m} + 7)) ]', "awk"),
  Kind("{path}/{f}.csv has lines of the form name,number. Write the names, one a line in their order, to {path}/{w}.txt.",
       "mkdir -p {path}; printf '{x},{n}\\n{y},{m}\\n{w},7\\n' > {path}/{f}.csv",
       "awk -F, '{{print $1}}' {path}/{f}.csv > {path}/{w}.txt", '[ "$(cat {path}/{w}.txt)" = "{x}\n{y}\n{w}" ]', "awk"),
  Kind("Write the number of lines in {path}/{f}.txt that contain {w} to {path}/{y}.txt.",
       "mkdir -p {path}; for i in $(seq {n}); do echo {w} $i; echo {x}; done > {path}/{f}.txt",
       "grep -c {w} {path}/{f}.txt > {path}/{y}.txt", '[ "$(cat {path}/{y}.txt)" = {n} ]', "grep"),
  Kind("Write the names of the files in {path} that contain {w}, one a line in alphabetical order and without their "
       "folder, to /srv/{y}.txt.", "mkdir -p {path}; echo {w} > {path}/a-{e}; echo {x} > {path}/b-{e}; echo {x} {w} > {path}/c-{e}",
       "cd {path} && grep -l {w} * > /srv/{y}.txt", '[ "$(cat /srv/{y}.txt)" = "a-{e}\nc-{e}" ]', "cd grep"),
  Kind("Write the number of lines of {path}/{f}.txt, and nothing else, to {path}/{w}.txt.",
       "mkdir -p {path}; seq {n}{m} > {path}/{f}.txt", "wc -l < {path}/{f}.txt > {path}/{w}.txt",
       '[ "$(tr -d " " < {path}/{w}.txt)" = {n}{m} ]', "wc"),
  Kind("Join {path}/{w}.txt and {path}/{x}.txt, in this order, to {path}/{f}.txt.",
       "mkdir -p {path}; echo {y} > {path}/{w}.txt; echo {e} > {path}/{x}.txt",
       "cat {path}/{w}.txt {path}/{x}.txt > {path}/{f}.txt", '[ "$(cat {path}/{f}.txt)" = "{y}\n{e}" ]', "cat"),
  Kind("Write an executable script {path}/{f}.sh that waits 1 second, prints {w}, and ends with exit status {n}.",
       "mkdir -p {path}",
       "printf '#!/bin/bash\\nsleep 1\\necho {w}\\nexit {n}\\n' > {path}/{f}.sh && chmod +x {path}/{f}.sh",
       '[ "$({path}/{f}.sh; echo $?)" = "{w}\n{n}" ] && grep -q sleep {path}/{f}.sh', "sleep echo exit chmod"),
)  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
  """The tasks, in an order that is mixed but always the same."""
  numbers = [(each, kind) for each in range(EACH) for kind in range(len(KINDS))]
  random.Random(2505).shuffle(numbers)
  for each, kind in numbers:
    yield _row(KINDS[kind], random.Random(f"lifelong-os {each} {kind}"))


def _row(kind: Kind, rng: random.Random) -> dict[str, Any]:
  (u, v), (g, h), (d, e) = (rng.sample(pool.split(), 2) for pool in (_USERS, _GROUPS, _FOLDERS))
  w, x, y = rng.sample(_WORDS.split(), 3)
  above = rng.choice(("/srv/data", "/opt", "/var/lib", "/home/shared", "/mnt"))
  filling = {
    "u": u, "v": v, "g": g, "h": h, "e": e, "w": w, "x": x, "y": y, "f": rng.choice(_FILES.split()),
    "n": rng.randint(2, 9), "m": rng.randint(2, 9), "path": f"{above}/{d}",
  }  # fmt: skip
  words, prepare, truth, check = (text.format_map(filling) for text in kind[:4])
  return {
    "instruction": words,
    "initialization_command_item": {"command_name": "bash", "script": prepare},
    "evaluation_info": {
      "evaluation_command_item": {"command_name": "bash", "script": check},
      "ground_truth_command_item": {"command_name": "bash", "script": truth},
    },
    "skill_list": kind.skills.split(),
    "raw_entry_hash": hashlib.sha256(f"{words}\n{truth}".encode()).hexdigest(),
  }
