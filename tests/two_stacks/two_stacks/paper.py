"""A model with two stacks of another width, visibility and number of tokens, as MAE's are.

iGPT's causal blocks; above a bridge, narrower blocks with a query for each pixel behind the
content, which sees the content up to its own place.
"""

from functools import cached_property

import torch
from megavis.papers.two_stacks.config import TwoStacksConfig
from torch import nn

from megavis.composition.model import Model
from megavis.densities.categorical import Categorical
from megavis.model.flops import Workload
from megavis.model.parameters import filled, normal
from megavis.model.stack import Bridge, LayerPlan, block_plans

GROUPS = ("content_groups", "query_groups")


class QueryBridge(Bridge):
    def __init__(self, below, above, num_tokens):
        super().__init__(below, above)
        self.query = filled(above.model.hidden_size, fill=normal(0.5))
        self.places = filled(num_tokens, above.model.hidden_size, fill=normal(0.5))

    def enter(self, hidden, carried):
        queries = (self.query + self.places[: hidden.shape[1]]).expand_as(hidden).to(hidden.dtype)
        groups = torch.arange(hidden.shape[1], device=hidden.device)[None]
        named = {"content_groups": groups, "query_groups": groups + 1}
        return torch.cat([hidden, queries], dim=1), named


class TwoStacks(Model):
    config_type = TwoStacksConfig

    @cached_property
    def upper(self):
        paper = self.config.objective
        size = {"num_layers": paper.upper_layers, "hidden_size": paper.upper_size}
        heads = {"num_attention_heads": 2, "ffn_hidden_size": 3 * paper.upper_size}
        model = self.core.model.model_copy(update=size | heads)
        return self.core.with_stack(
            name="upper", model=model, visibility_kind="two_stream", carried_names=GROUPS
        )

    @cached_property
    def density(self):
        return Categorical(self.upper, self.paper.vocabulary_size, fill=normal(0.5))

    def workload(self):
        # The bridge is the map above the first stack.
        return Workload.of_one_stream(self.num_tokens, self.upper.model.hidden_size, causal=True)

    def upper_layers(self):
        count, depth, seed = self.num_tokens, self.core.model.num_layers + 1, self.config.seed
        work = Workload(2 * count, count, count, count, self.density.num_outputs)
        bridge = LayerPlan("bridge", self._build_bridge, seed, depth, gives_features=True)
        return [bridge, *block_plans(self.upper, work, seed=seed, depth=depth + 1)]

    def _build_bridge(self) -> nn.Module:
        return QueryBridge(self.core, self.upper, self.num_tokens)
