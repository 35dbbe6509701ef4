"""The whole model: tokenizers -> shared backbone, each modality under its route -> fusion -> head."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mmadapt.adapters import AdapterBank
from mmadapt.backbone import Backbone
from mmadapt.plans import CheckpointPlan

if TYPE_CHECKING:
    from mmadapt.data import Batch

__all__ = ["MultimodalModel"]


class MultimodalModel(nn.Module):
    """Several modalities through one backbone.

        inputs[m]  --tokenizer m-->  tokens (B, N_m, D)  --blocks under route m-->  mean over N_m  -->  feature (B, D)
        features   --fusion-->  (B, out_dim)  --head-->  logits (B, classes)

    backbone: shared by all modalities. tokenizers: one per modality. bank: the backbone's adapters and routes.
    plan: which blocks are checkpointed.

    Raises:
        ValueError: the bank knows a modality that has no tokenizer; in forward, a batch without any modality or with
            an unknown one.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokenizers: Mapping[str, nn.Module],
        bank: AdapterBank,
        fusion: nn.Module,
        head: nn.Module,
        plan: CheckpointPlan | None = None,
    ) -> None:
        super().__init__()
        bank.declare(*tokenizers)
        without = sorted(set(bank.modalities) - set(tokenizers))
        if without:
            raise ValueError(f"tokenizers: expected one for each modality of the bank, got none for {without}")
        self.backbone = backbone
        self.tokenizers = nn.ModuleDict(tokenizers)
        self.bank = bank
        self.fusion = fusion
        self.head = head
        self.plan = plan or CheckpointPlan()

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.tokenizers)

    def forward(self, batch: "Batch | Mapping[str, Tensor]") -> Tensor:
        """A batch, or its inputs, to logits (B, classes)."""
        inputs = batch if isinstance(batch, Mapping) else batch.inputs
        return self.head(self.fusion(self.features(inputs)))

    def features(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One vector (B, D) per modality that is present, in the model's order of modalities."""
        unknown = sorted(set(inputs) - set(self.modalities))
        if unknown or not inputs:
            raise ValueError(
                f"batch: expected at least one of the modalities {list(self.modalities)}, got {sorted(inputs)}"
            )
        features = {}
        for modality in self.modalities:
            if modality in inputs:
                tokens = self._tokens(modality, inputs[modality])
                with self.bank.active(modality):
                    tokens = self.backbone(tokens, self.plan)  # (B, N, D)
                features[modality] = tokens.mean(dim=1)
        return features

    def _tokens(self, modality: str, clips: Tensor) -> Tensor:
        try:
            return self.tokenizers[modality](clips)
        except ValueError as error:
            raise ValueError(f"modality {modality!r}: {error}") from error

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The trainable parameters with their names in this model, by what they belong to.

        `adapter/<name>` for the adapters declared trainable, `tokenizer/<modality>`, `fusion`, `head`, and `backbone`
        if the bank does not freeze it. It does not depend on which adapter is active. Groups without parameters are
        left out, and so are parameters that the user froze.
        """
        prefix = {id(parameter): name for name, parameter in self.named_parameters()}
        adapters = {name: [p for _, p in self.bank.parameters(name)] for name in self.bank.names}
        groups: dict[str, list[nn.Parameter]] = {}
        if not self.bank.freeze:
            of_adapters = {id(p) for parameters in adapters.values() for p in parameters}
            groups["backbone"] = [p for p in self.backbone.parameters() if id(p) not in of_adapters and p.requires_grad]
        groups |= {f"adapter/{name}": adapters[name] for name in self.bank.trainable}
        for modality, tokenizer in self.tokenizers.items():
            groups[f"tokenizer/{modality}"] = [p for p in tokenizer.parameters() if p.requires_grad]
        groups["fusion"] = [p for p in self.fusion.parameters() if p.requires_grad]
        groups["head"] = [p for p in self.head.parameters() if p.requires_grad]
        return {name: [(prefix[id(p)], p) for p in group] for name, group in groups.items() if group}

    def trainable_state(self) -> dict[str, Tensor]:
        """All tensors but the frozen backbone's own parameters, by their names in this model.

        Frozen adapters are part of it: they are small, and a run cannot be resumed without them. It does not depend on
        which adapter is active.
        """
        frozen = self._frozen_names()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in frozen}

    def load_trainable_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `trainable_state` gave, exactly.

        Raises:
            ValueError: missing, extra or misshaped tensors, which are listed; nothing is loaded then.
        """
        check_keys(state, self.state_dict(), self._frozen_names())
        self.load_state_dict(dict(state), strict=False)

    def _frozen_names(self) -> set[str]:
        if not self.bank.freeze:
            return set()
        of_adapters = {id(p) for name in self.bank.names for _, p in self.bank.parameters(name)}
        return {f"backbone.{name}" for name, p in self.backbone.named_parameters() if id(p) not in of_adapters}


def check_keys(got: Mapping[str, Tensor], own: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
    """Check that tensors to load are exactly a module's own but for the frozen ones, in name and shape.

    Raises:
        ValueError: lists what is missing, extra or misshaped.
    """
    expected = {key: value for key, value in own.items() if key not in frozen}
    problems = {
        "missing": [key for key in expected if key not in got],
        "extra": [key for key in got if key not in expected],
        "misshaped": [
            f"{key} (expected {tuple(value.shape)}, got {tuple(got[key].shape)})"
            for key, value in expected.items()
            if key in got and got[key].shape != value.shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{kind}: {keys[:5]}{' ...' if len(keys) > 5 else ''}" for kind, keys in problems.items() if keys
        )
        raise ValueError(
            f"expected exactly the {len(expected)} trained tensors of this model, got {len(got)}; {listed}. Do: build "
            "the model with the adapters, tokenizers, fusion and head that they were saved with."
        )
