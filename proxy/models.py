"""The models as the running gateway knows them: what each can do, costs, and where it is deployed.

Plain dataclasses and no pydantic: they are read on every request. Cache prices that the operator left out
follow the provider's usual ratios to the input price, and stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from proxy.settings import CapabilitySettings, ModelSettings, PriceSettings

Effort = Literal["low", "medium", "high", "xhigh", "max"]
EFFORT_LEVELS: tuple[Effort, ...] = get_args(Effort)

EXACT = Context(prec=200)
"""Prices have at most a few dozen digits, so no product of two is ever rounded."""
CACHE_WRITE_5M_RATIO = Decimal("1.25")
CACHE_WRITE_1H_RATIO = Decimal("2")
CACHE_READ_RATIO = Decimal("0.1")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do; what isn't said, it can."""

    sampling: bool = True
    sampling_exclusive: bool = False
    """It takes only one of temperature and top_p."""
    prompt_caching: bool = True
    effort: tuple[Effort, ...] = EFFORT_LEVELS
    """Empty: it knows no effort."""
    forced_tool_choice: bool = True
    images: bool = True
    pdfs: bool = True
    structured_outputs: bool = True


@dataclass(frozen=True, slots=True)
class Price:
    """USD per million tokens. A cache price of None follows the input price: bill with the ``effective`` ones."""

    input: Decimal
    output: Decimal
    cache_write_5m: Decimal | None = None
    cache_write_1h: Decimal | None = None
    cache_read: Decimal | None = None

    def __hash__(self) -> int:
        return hash(self.input)  # prices are looked up at every request, and a Decimal takes its time

    @property
    def effective_cache_write_5m(self) -> Decimal:
        return self._derived(CACHE_WRITE_5M_RATIO) if self.cache_write_5m is None else self.cache_write_5m

    @property
    def effective_cache_write_1h(self) -> Decimal:
        return self._derived(CACHE_WRITE_1H_RATIO) if self.cache_write_1h is None else self.cache_write_1h

    @property
    def effective_cache_read(self) -> Decimal:
        return self._derived(CACHE_READ_RATIO) if self.cache_read is None else self.cache_read

    def _derived(self, ratio: Decimal) -> Decimal:
        return EXACT.normalize(EXACT.multiply(self.input, ratio))


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model at an upstream, under that upstream's name for it."""

    upstream: str
    model: str
    priority: int = 0
    """The lowest number is asked first."""
    weight: float = 1.0
    max_parallel: int | None = None
    counts_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    """The canonical id, as written in the YAML."""
    aliases: tuple[str, ...]
    display_name: str
    owned_by: str
    created: int
    """Seconds since 1970."""
    max_output_tokens: int
    context_window: int | None
    capabilities: Capabilities
    price: Price
    deployments: tuple[Deployment, ...]


class ModelTable:
    """All models, in the order of the YAML."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = tuple(models)
        self._by_name = {name_key(name): model for model in self._models for name in (model.id, *model.aliases)}

    @classmethod
    def from_settings(cls, settings: Iterable[ModelSettings]) -> ModelTable:
        return cls(_model(each) for each in settings)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> Model | None:
        """By id or alias, in any letter case, spaces around it ignored. Whatever isn't a name finds nothing."""
        return self._by_name.get(name_key(name)) if isinstance(name, str) else None

    def visible(self, allowed: frozenset[str] | None) -> list[Model]:
        """The models with these canonical ids; all of them for None."""
        return [model for model in self._models if allowed is None or model.id in allowed]


def name_key(name: str) -> str:
    """Two names with the same key name the same model."""
    return name.strip().casefold()


def display_name_from_id(id: str) -> str:
    """``anthropic/claude-sonnet-5-5``: ``Claude Sonnet 5.5``."""
    words = re.sub(r"(?:(?<=[-_])|^)([0-9]{1,2})[-_](?=[0-9]{1,2}(?:[-_]|$))", r"\1.", id.rsplit("/", 1)[-1])
    return " ".join(word[:1].upper() + word[1:] for word in re.split(r"[-_\s]+", words) if word) or id


def owner_from_id(id: str) -> str:
    """``anthropic/claude-sonnet-5-5``: ``anthropic``; without a slash ``local``."""
    owner, slash, _ = id.partition("/")
    return owner if slash and owner else "local"


def _model(settings: ModelSettings) -> Model:
    return Model(
        id=settings.id,
        aliases=settings.aliases,
        display_name=settings.display_name or display_name_from_id(settings.id),
        owned_by=settings.owned_by or owner_from_id(settings.id),
        created=settings.created,
        max_output_tokens=settings.max_output_tokens,
        context_window=settings.context_window,
        capabilities=_capabilities(settings.capabilities),
        price=_price(settings.price),
        deployments=tuple(
            Deployment(
                each.upstream,
                each.model,
                each.priority,
                each.weight,
                each.max_parallel,
                counts_tokens=each.profile.count_tokens is not False,
            )
            for each in settings.deployments
        ),
    )


def _capabilities(settings: CapabilitySettings) -> Capabilities:
    return Capabilities(**{name: getattr(settings, name) for name in Capabilities.__slots__})


def _price(settings: PriceSettings) -> Price:
    return Price(**{name: getattr(settings, name) for name in Price.__slots__})
