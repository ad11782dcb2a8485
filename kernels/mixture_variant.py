"""Variants of a mixture of experts, as data. This module imports no kernel and no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Router:
    """The rule from a token's logits, one for each of E experts, to k experts in order of rank, and their weights.

    1. Scores, of all E: the softmax or the sigmoid of the logits, or the logits themselves; if `rounded_scores`, they
       are rounded to the model's dtype.
    2. The choice is made by the score, or by score + choice bias where there is one: descending, equals by ascending
       id. With groups (equal runs of ids), only experts of the `kept_groups` best groups can be chosen; a group is as
       good as the sum of its two best, or as its best one (`group_best`), equals by ascending number.
    3. Weights are the chosen experts' scores without the bias; of the logits, the softmax over the chosen ones. If
       `normed`, they are divided by `max(their sum + sum_offset, least_sum)`, the sum taken in order of rank. Then they
       are multiplied with `scaling`, and, if `rounded`, rounded to the model's dtype.

    wide: whether the logits are products in float32, of a weight in float32; else they have the model's dtype.
    """

    experts: int  # E
    chosen: int  # k
    scores: Literal["softmax", "sigmoid", "logit"] = "softmax"
    wide: bool = False
    bias: bool = False  # whether the logits' product has one
    choice_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: Literal[1, 2] = 2
    normed: bool = False
    sum_offset: float = 0.0
    least_sum: float = 0.0
    scaling: float = 1.0
    rounded: bool = True
    rounded_scores: bool = False

    @property
    def problems(self) -> list[str]:
        """A sentence for each size that contradicts another one."""
        problems = []
        if self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            problems.append(f"{self.experts} experts in {self.groups} groups, of which {self.kept_groups} are selected")
        elif self.groups > 1 and self.experts // self.groups < self.group_best:
            problems.append(f"{self.experts} experts in {self.groups} groups: a group needs {self.group_best}")
        elif not 1 <= self.chosen <= self.experts // self.groups * self.kept_groups:
            problems.append(f"a token cannot have {self.chosen} of {self.experts} experts")
        return problems


@dataclass(frozen=True)
class Mixture:
    """A feed-forward made of experts, of which each token has some, and a shared one, which all tokens have."""

    router: Router
    intermediate_size: int  # of an expert
    bias: bool = False  # whether the experts' products have biases
    shared_size: int = 0  # the shared expert's intermediate size; 0: there is none
    shared_gate: bool = False  # whether its output is multiplied with the sigmoid of a product of its own

    @property
    def features(self) -> int:
        """The intermediate features of a token, all its experts' together."""
        return self.router.chosen * self.intermediate_size + self.shared_size
