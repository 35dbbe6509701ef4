"""The adapters of one shared backbone: add, load, route, activate, save.

PEFT's own switch, `set_adapter`, also writes `requires_grad`: it freezes what it deactivates and unfreezes what it
activates. Autograd reads that flag when backward accumulates, so after two switches the first modality's gradients are
dropped without a word (peft #2759, #1303). Here the trainable set is declared once, when an adapter is added, and a
switch writes the active adapters of a cached list of tuner layers and nothing else.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from mmadapt.adapter_files import FILES, check_fit, read_adapter
from mmadapt.errors import unknown
from mmadapt.files import written_folder
from mmadapt.layers import TunerLayers, adapter_parameters, linear_names
from mmadapt.rows import RowRoutes

__all__ = ["AdapterBank"]


class AdapterBank:
    """The named adapters of a backbone and the route of each modality through them.

    backbone: any module; a `Backbone` of ours says which of its modules PEFT wraps (`peft_module`).
    modalities: names known from the start, so that one without any adapter has a route too, the empty one.
    freeze: freeze the backbone's own parameters, once, now. With False their flags stay as they are.

    The order in which adapters are added to a modality is the order of its route. `model` is a genuine
    `peft.PeftModel` over the backbone, there from the first adapter on.
    """

    def __init__(self, backbone: nn.Module, modalities: Sequence[str] = (), *, freeze: bool = True) -> None:
        self.backbone: nn.Module = getattr(backbone, "peft_module", backbone)
        self.freeze = freeze
        if freeze:
            self.backbone.requires_grad_(False)
        self._base_flags = [(p, p.requires_grad) for p in self.backbone.parameters()]
        self._peft: PeftModel | None = None
        self._trainable: dict[str, bool] = {}
        self._routes: dict[str, tuple[str, ...]] = dict.fromkeys(modalities, ())
        self._invoked: dict[str, str] = {}  # modality -> the adapter whose invocation tokens PEFT looks for (aLoRA)
        self._cache: TunerLayers | None = None

    @classmethod
    def from_peft(
        cls,
        model: PeftModel,
        routes: Mapping[str, Sequence[str]],
        trainable: Sequence[str],
        *,
        freeze: bool = True,
    ) -> "AdapterBank":
        """A bank over the adapters of a PeftModel that is there already, the same object, which keeps its layers.

        routes: the adapters of each modality, in order. trainable: which adapters train; the others are frozen.
        freeze: as in the constructor. Afterwards no adapter is active outside of `active`.

        Raises:
            ValueError: no PeftModel, adapters that it does not have or that PEFT cannot save, one without a route.
        """
        if not isinstance(model, PeftModel):
            raise ValueError(f"AdapterBank.from_peft: expected a peft.PeftModel, got {type(model).__name__}")
        used = dict.fromkeys(name for route in routes.values() for name in route)
        for name in (*used, *trainable):
            if name not in model.peft_config:
                raise ValueError(unknown("AdapterBank.from_peft: adapter", name, model.peft_config))
        if idle := [name for name in model.peft_config if name not in used]:
            raise ValueError(
                f"AdapterBank.from_peft: expected a route for each adapter, got none for {idle}. "
                "Do: name them in routes, or delete them with model.delete_adapter."
            )
        bank = cls(model.get_base_model(), tuple(routes), freeze=False)
        bank._peft = model
        for name in used:
            config = model.peft_config[name]
            modalities = [modality for modality, route in routes.items() if name in route]
            bank._check_config(name, config)
            bank._check_invocation(name, config, modalities)
            bank._declare(name, modalities, name in trainable)
        bank._check_savable()
        bank._routes = {modality: tuple(route) for modality, route in routes.items()}
        bank.freeze = freeze
        adapted = {id(p) for name in used for _, p in adapter_parameters(bank.backbone, name)}
        base = [p for p in bank.backbone.parameters() if id(p) not in adapted]
        bank._base_flags = [(p, p.requires_grad and not freeze) for p in base]
        bank._write_flags()
        bank._layers().activate(())
        return bank

    @property
    def model(self) -> PeftModel:
        """The PeftModel over the backbone.

        Raises:
            ValueError: no adapter was added yet, and PEFT has no model without one.
        """
        if self._peft is None:
            raise ValueError("AdapterBank.model: expected at least one adapter, got none. Do: call add or load first.")
        return self._peft

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters, in the order in which they were added."""
        return tuple(self._trainable)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The adapters declared trainable, whichever is active."""
        return tuple(name for name, is_trainable in self._trainable.items() if is_trainable)

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def declare(self, *modalities: str) -> None:
        """Make modalities known; one that no adapter was added for has the empty route, the plain backbone."""
        for modality in modalities:
            self._routes.setdefault(modality, ())

    def route(self, modality: str) -> tuple[str, ...]:
        """The adapters active for a modality, in order; empty means the plain backbone.

        Raises:
            ValueError: an unknown modality.
        """
        try:
            return self._routes[modality]
        except KeyError:
            raise ValueError(unknown("modality", modality, self._routes)) from None

    def add(
        self,
        name: str,
        config: PeftConfig,
        *,
        modality: str | Sequence[str],
        trainable: bool,
    ) -> None:
        """Add a fresh adapter to the end of a modality's route (or of several, which then share it).

        Raises:
            ValueError: a name that is taken or that PEFT cannot save, targets that hit nothing or lie outside the
                blocks, a config that PEFT cannot combine with the adapters there. The bank is then as before.
        """
        self._check_name(name)
        self._check_config(name, config)
        self._check_invocation(name, config, modality)
        self._inject(name, config)
        try:
            self._check_targets(name)
            self._check_savable()
        except ValueError:
            self._eject(name)
            raise
        self._declare(name, modality, trainable)
        self._write_flags()

    def load(
        self,
        name: str,
        path: str | Path,
        *,
        modality: str | Sequence[str],
        trainable: bool,
    ) -> None:
        """Add an adapter from a folder in PEFT's format.

        Raises:
            ValueError: the folder is no PEFT adapter, or its tensors are not exactly those of this
                backbone: missing, extra and misshaped ones are listed. The bank is then as before.
        """
        self._check_name(name)
        config, weights = read_adapter(Path(path).expanduser())
        self._check_config(name, config)
        self._check_invocation(name, config, modality)
        config.inference_mode = not trainable
        try:
            self._inject(name, config)
        except ValueError as error:  # PEFT's message knows neither the folder nor what the backbone has
            raise ValueError(
                f"adapter folder {path}: expected an adapter for layers of this backbone, "
                f"{linear_names(self.backbone)}, got {getattr(config, 'target_modules', None)!r}: {error}"
            ) from error
        try:
            self._check_targets(name)
            self._check_savable()
            check_fit(
                path,
                weights,
                get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False),
            )
            set_peft_model_state_dict(self.model, weights, adapter_name=name)
        except (ValueError, RuntimeError) as error:
            self._eject(name)
            if isinstance(error, ValueError):
                raise
            raise ValueError(
                f"adapter folder {path}: expected tensors of this backbone's shapes, got: {error}"
            ) from error
        self._declare(name, modality, trainable)
        self._write_flags()

    def save(self, name: str, folder: str | Path) -> Path:
        """Write one adapter in PEFT's format, whole or not at all; returns the folder.

        Raises:
            ValueError: an unknown adapter.
            FileExistsError: there is a file, or a folder that holds something else than an adapter.
        """
        if name not in self._trainable:
            raise ValueError(unknown("adapter", name, self._trainable))
        target = Path(folder).expanduser()
        with written_folder(target, replaces=FILES) as temporary:
            parent = temporary / "save"  # PEFT writes an adapter that is not named "default" to a sub-folder
            self.model.save_pretrained(str(parent), selected_adapters=[name], save_embedding_layers=False)
            written = parent / name if name != "default" else parent
            for file in [f for f in written.iterdir() if f.is_file()]:
                file.rename(temporary / file.name)
            if written is not parent:
                (parent / "README.md").rename(temporary / "README.md")
                written.rmdir()
            parent.rmdir()
        return target

    def parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """An adapter's parameters with their names in the backbone, in the order of its layers.

        Raises:
            ValueError: an unknown adapter.
        """
        if name not in self._trainable:
            raise ValueError(unknown("adapter", name, self._trainable))
        return adapter_parameters(self.backbone, name)

    def targets(self, name: str) -> list[str]:
        """The names of the backbone's modules that an adapter changes."""
        return [
            path
            for path, layer in self.backbone.named_modules()
            if isinstance(layer, BaseTunerLayer) and name in layer._get_available_adapters()
        ]

    @contextmanager
    def active(self, modality: str | None = None, *, rows: Sequence[str] | None = None) -> Iterator[None]:
        """Run the body with a modality's route active. Nests; the route before is back afterwards, also on errors.

        Writes the active adapters of the tuner layers and no `requires_grad`. With `rows`, the modality of each row of
        the batch, each row runs under the route of its own modality, in training too (see `mmadapt.rows`); the inputs
        of all adapted layers must then have the rows in front.

        For aLoRA, `model` looks for the invocation tokens of the modality's adapter.

        Raises:
            ValueError: an unknown modality; both or none of the arguments; layers whose rows cannot run apart.
        """
        if (modality is None) == (rows is None):
            raise ValueError(f"active: expected a modality or rows=[...], got modality={modality!r} and rows={rows!r}")
        layers = self._layers()
        if rows is not None:
            if self._invoked:
                raise ValueError(
                    f"active(rows=...): expected adapters without invocation tokens, got {list(self._invoked.values())}"
                    " (aLoRA), for which PEFT looks in all rows of a batch. Do: one forward per modality."
                )
            with layers.rows_routed(RowRoutes(rows, self._routes)):
                yield
            return
        assert modality is not None
        route = self.route(modality)
        suspended = layers.suspend_rows()
        before = layers.activate(route)
        if invoked := self._invoked.get(modality):
            looked_for, self.model.active_adapter = self.model.active_adapter, invoked
        try:
            yield
        finally:
            if invoked:
                self.model.active_adapter = looked_for
            layers.restore(before)
            for d, forward in suspended:
                d["forward"] = forward

    def check_flags(self) -> None:
        """Check that `requires_grad` of every adapter is as declared: O(parameters of the adapters).

        PEFT's `set_adapter` and `disable_adapter` write it, after which an adapter would silently train no more.

        Raises:
            ValueError: an adapter whose flags changed.
        """
        for name, is_trainable in self._trainable.items():
            wrong = [path for path, p in adapter_parameters(self.backbone, name) if p.requires_grad != is_trainable]
            if wrong:
                raise ValueError(
                    f"adapter {name!r}: expected requires_grad={is_trainable} as declared, got {not is_trainable} for "
                    f"{len(wrong)} parameters such as {wrong[0]}. Likely cause: PEFT's set_adapter or disable_adapter, "
                    "which write it. Do: switch with AdapterBank.active."
                )

    def _layers(self) -> "TunerLayers":
        if self._cache is None or not self._cache.holds(self._peft):
            self._cache = TunerLayers(self.backbone, self._peft)
        return self._cache

    def _inject(self, name: str, config: PeftConfig) -> None:
        """Let PEFT inject the adapter. It activates what it adds: the layers' routes are afterwards what they were."""
        known = self._layers()
        before = dict(zip(map(id, known.layers), known.activate(()), strict=True))
        try:
            if self._peft is None:
                self._peft = get_peft_model(self.backbone, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        except BaseException:  # PEFT may fail with some layers changed and some not
            self._eject(name)
            raise
        finally:
            layers = self._layers()
            layers.restore([before.get(id(layer), []) for layer in layers.layers])

    def _eject(self, name: str) -> None:
        """Remove all traces of an adapter, also of one that PEFT injected in part; the bank is as before."""
        if self._peft is not None:
            self._peft.peft_config.pop(name, None)
        for parent in list(self.backbone.modules()):
            for key, layer in list(parent._modules.items()):
                if isinstance(layer, BaseTunerLayer):
                    layer._active_adapter = [n for n in layer.active_adapters if n != name]
                    layer.delete_adapter(name)
                    if not layer._get_available_adapters():
                        parent._modules[key] = layer.get_base_layer()
        if self._peft is not None and not self._peft.peft_config:
            self._peft = None
        if self._peft is None:
            vars(self.backbone).pop("peft_config", None)  # PEFT's note on the model that it wrapped
        self._write_flags()

    def _declare(self, name: str, modality: str | Sequence[str], trainable: bool) -> None:
        self._trainable[name] = trainable
        for each in [modality] if isinstance(modality, str) else modality:
            self._routes[each] = (*self._routes.get(each, ()), name)
            if self._invocation(name):
                self._invoked[each] = name

    def _write_flags(self) -> None:
        """The one place that writes `requires_grad`: as declared, since PEFT wrote its own on adding."""
        for parameter, flag in self._base_flags:
            parameter.requires_grad_(flag)
        for name, is_trainable in self._trainable.items():
            for _, parameter in adapter_parameters(self.backbone, name):
                parameter.requires_grad_(is_trainable)

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
            raise ValueError(
                f"adapter name: expected letters, digits, '_' and '-', got {name!r}. A dot would split torch's module "
                "path, a separator the folder's."
            )
        if name in self._trainable:
            raise ValueError(
                f"adapter name: expected a new one, got {name!r}, which is taken; there are {list(self.names)}"
            )
        components = {part for path, _ in self.backbone.named_modules() for part in path.split(".")}
        components |= {path.rsplit(".", 1)[-1] for path, _ in self.backbone.named_parameters()}
        if name in components:
            raise ValueError(
                f"adapter name: expected one that is no part of the backbone's module names, got {name!r}. PEFT "
                f"matches parts of names when it saves. Do: choose another, such as {name + '_adapter'!r}."
            )

    def _check_config(self, name: str, config: PeftConfig) -> None:
        if not isinstance(config, PeftConfig) or config.is_prompt_learning or not hasattr(config, "target_modules"):
            raise ValueError(
                f"adapter {name!r}: expected a config of a family that injects layers, such as peft.LoraConfig, got "
                f"{type(config).__name__}"
            )
        prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type, "")  # type: ignore[call-overload]
        if name in prefix:
            raise ValueError(
                f"adapter name: expected one that is no part of PEFT's prefix {prefix!r}, got {name!r}. PEFT may start "
                "such an adapter afresh when it loads it. Do: choose a longer one."
            )
        if heads := getattr(config, "modules_to_save", None):
            raise ValueError(
                f"adapter {name!r}: expected no modules_to_save, got {heads}. It makes one copy of "
                "the module per adapter, and two active adapters cannot both have one. Do: keep heads outside."
            )
        families = {str(there.peft_type) for there in self._peft.peft_config.values()} if self._peft else set()
        if families - {str(config.peft_type)}:
            raise ValueError(
                f"adapter {name!r}: expected the family of the adapters there, {families.pop()}, got "
                f"{config.peft_type!s}. PEFT holds one family per model."
            )

    def _check_invocation(self, name: str, config: PeftConfig, modality: str | Sequence[str]) -> None:
        """Refuse what PEFT would get wrong: it looks for one sequence of invocation tokens in a forward."""
        tokens = getattr(config, "alora_invocation_tokens", None)
        for each in [modality] if isinstance(modality, str) else modality:
            there = self._invoked.get(each)
            if tokens and there and list(tokens) != list(self._invocation(there) or ()):
                raise ValueError(
                    f"adapter {name!r}: expected the alora_invocation_tokens of {there!r} on the route of {each!r}, "
                    f"{self._invocation(there)}, got {tokens}. PEFT looks for one sequence in a forward."
                )

    def _invocation(self, name: str) -> Sequence[int] | None:
        return getattr(self.model.peft_config[name], "alora_invocation_tokens", None)

    def _check_targets(self, name: str) -> None:
        targets = self.targets(name)
        if not targets:
            raise ValueError(f"adapter {name!r}: expected target_modules that hit a layer of the backbone, got none")
        blocks = getattr(self.backbone, "blocks", None)
        if isinstance(blocks, nn.Module):
            inside = {id(module) for module in blocks.modules()}
            modules = dict(self.backbone.named_modules())
            outside = [path for path in targets if id(modules[path]) not in inside]
            if outside:
                raise ValueError(
                    f"adapter {name!r}: expected target_modules inside the blocks, got {outside} as well. Do: name "
                    r"them by a pattern such as '.*blocks\.\d+\.attn\.(qkv|proj)', or exclude_modules=[the others]."
                )

    def _check_savable(self) -> None:
        """PEFT picks an adapter's tensors by name. Refuse at creation a name with which it would pick others."""
        for name in self.model.peft_config:
            saved = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
            expected = {parameter.data_ptr() for _, parameter in adapter_parameters(self.backbone, name)}
            if {t.data_ptr() for t in saved.values() if isinstance(t, Tensor)} != expected:
                others = [other for other in self.model.peft_config if other != name]
                raise ValueError(
                    f"adapter name: expected names that PEFT saves whole, got {name!r} beside {others}. "
                    "Do: choose a name that is no part of PEFT's prefixes (lora_A, lora_B, ...) or of module names."
                )

    def __getstate__(self) -> dict[str, Any]:
        # The cache holds the layers' __dict__s, which a copy or a pickle would not tie to the copied layers again.
        return vars(self) | {"_cache": None}

    def __repr__(self) -> str:
        routes = ", ".join(f"{modality}: {list(route)}" for modality, route in self._routes.items())
        return f"AdapterBank({routes}; trainable: {list(self.trainable)})"
