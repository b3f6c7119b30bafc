"""Cluster ids on the host: who is compared with whom."""

import numpy as np
import pytest

from memrl_jax.ops import anchors


def test_exact_ids_count_from_zero_in_order_of_appearance():
  ids_N = anchors.exact_clusters([("a", "x"), ("b", "x"), ("a", "x"), ("a", "y")])
  np.testing.assert_array_equal(ids_N, [0, 1, 0, 2])
  assert ids_N.dtype == np.int32
  assert anchors.exact_clusters([]).shape == (0,)


def test_similar_texts_join_only_inside_their_group():
  # ratio("abcd", "abcx") = 2 * 3 / 8 = .75, ratio("abcd", "abxy") = 2 * 2 / 8 = .5.
  texts = ["abcd", "abcx", "abxy", "abcd"]
  ids_N = anchors.similarity_clusters(["g", "g", "g", "h"], texts, 0.75)
  np.testing.assert_array_equal(ids_N, [0, 0, 1, 2])


def test_the_representative_is_the_first_text_of_the_cluster():
  # The third resembles the second (.75) but not the first (.5), which represents both.
  ids_N = anchors.similarity_clusters(["g"] * 3, ["abcd", "abcx", "abyx"], 0.75)
  np.testing.assert_array_equal(ids_N, [0, 0, 1])


def test_long_texts_of_few_characters_are_compared_like_short_ones():
  # 300 characters, 10 of them changed: ratio = 290 / 300 at least. With difflib's autojunk every
  # frequent character is skipped and the ratio falls to a few per cent.
  board = "#.o" * 100
  changed = "X" + board[1:150] + "XXXXXXXXX" + board[159:]
  np.testing.assert_array_equal(
    anchors.similarity_clusters(["g"] * 2, [board, changed], 0.9), [0, 0]
  )


def test_threshold_one_is_exact():
  texts = ["up", "up", "upp", "down"]
  np.testing.assert_array_equal(
    anchors.similarity_clusters(["g"] * 4, texts, 1.0), anchors.exact_clusters(texts)
  )


@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_threshold_out_of_range_is_refused(threshold):
  with pytest.raises(ValueError, match="at most 1"):
    anchors.similarity_clusters(["g"], ["x"], threshold)


def test_longer_contexts_demand_the_same_history():
  # Trajectories 0: a b c, 1: x b c, 2: a b c. k=1 sees the anchor alone; k=2 splits b and keeps c
  # together (b c); k=3 splits c as well.
  trajectories = [0, 0, 0, 1, 1, 1, 2, 2, 2]
  seen = list("abcxbcabc")
  ids_KN = anchors.context_clusters(["g"] * 9, trajectories, seen, contexts=3)
  np.testing.assert_array_equal(ids_KN[0], [0, 1, 2, 3, 1, 2, 0, 1, 2])
  np.testing.assert_array_equal(ids_KN[1], [0, 1, 2, 3, 4, 2, 0, 1, 2])
  np.testing.assert_array_equal(ids_KN[2], [0, 1, 2, 3, 4, 5, 0, 1, 2])


def test_interleaved_rows_keep_their_own_history():
  ids_KN = anchors.context_clusters(["g"] * 4, [0, 1, 0, 1], ["a", "x", "b", "b"], contexts=2)
  np.testing.assert_array_equal(ids_KN, [[0, 1, 2, 2], [0, 1, 2, 3]])


def test_the_same_trajectory_number_in_two_groups_is_two_trajectories():
  # The third row's context is (a, c) as the fifth's, not (b, c); the last a is another group's.
  groups, trajectories = ["g", "h", "g", "g", "g", "h"], [0, 0, 0, 1, 1, 1]
  ids_KN = anchors.context_clusters(groups, trajectories, list("abcaca"), contexts=2)
  np.testing.assert_array_equal(ids_KN[1], [0, 1, 2, 0, 2, 3])


def test_uneven_columns_are_refused_with_their_lengths():
  with pytest.raises(ValueError, match=r"'groups': 2.*'anchors': 1"):
    anchors.context_clusters([0, 0], [0, 0], ["a"], contexts=1)
