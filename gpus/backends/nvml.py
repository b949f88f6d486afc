"""Real cards through the driver's management library. The only file that imports pynvml; it runs inside a reader.

Every value is asked by itself: what a card does not say is `None` with the driver's word in `missing`, and the
card keeps the others. Handles are kept: fetching them again at every sweep costs a quarter more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pynvml as nvml

from gpus import procfs
from gpus.backends.base import BackendUnavailable, CardLost, CardSilent
from gpus.readings import CardInfo, CardReading, GpuProcess, is_instance

T = TypeVar("T")
Handle = Any

#: The card is gone, or no use before its reset.
GONE = {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_GPU_NOT_FOUND, nvml.NVML_ERROR_RESET_REQUIRED}
#: The library in this process can read nothing any more.
DRIVER_REPAIRS = {
    nvml.NVML_ERROR_UNINITIALIZED: "The driver was unloaded; it is asked again.",
    nvml.NVML_ERROR_DRIVER_NOT_LOADED: "Load the kernel module (`modprobe nvidia`), or reboot.",
    nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The driver was upgraded under the running kernel module: reboot.",
    nvml.NVML_ERROR_NO_PERMISSION: "This user may not open /dev/nvidia*: check their mode and the user's groups.",
}
COMPUTE_MODES = {
    nvml.NVML_COMPUTEMODE_DEFAULT: "default",
    nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive_thread",
    nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
}
#: Bits of `nvmlDeviceGetCurrentClocksEventReasons` that slow a card; being idle is none of them.
SLOWDOWNS = {
    nvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
    nvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    nvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    nvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    nvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    nvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal_slowdown",
    nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    nvml.nvmlClocksEventReasonDisplayClockSetting: "display_clock_setting",
}
NOT_SUPPORTED = str(nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED))
#: Devices without memory of their own, for drivers too old to tell how their addresses are made.
INTEGRATED = {"GB10", "Thor", "Orin", "Xavier", "Tegra"}
OF_THE_WHOLE = "a MIG instance has none of its own: see its card"
#: What a process outside every MIG instance has for an instance (nvml.h).
NO_INSTANCE = 0xFFFFFFFF
#: No card is hotter, or draws more, than this; a driver that says so says nonsense.
HOTTEST_CELSIUS, LARGEST_WATTS = 200, 5000


def no_driver(error: nvml.NVMLError) -> BackendUnavailable:
    """Why no card can be read. The next question needs a new process: the library stays as it was loaded."""
    reason = f"The NVIDIA driver does not answer: {str(error).rstrip('.')}."
    return BackendUnavailable(
        reason, DRIVER_REPAIRS.get(error.value, "`nvidia-smi` shows the same error."), stale_library=True
    )


class Card:
    """One card under its handle, asked value by value."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.missing: dict[str, str] = {}

    def ask(self, fields: str, question: Callable[..., T], *args: Any) -> T | None:
        """The driver's answer. `None`, with its word under each of `fields`, when it has none.

        Raises `CardLost`, or `BackendUnavailable` when the driver itself is gone.
        """
        try:
            return question(self.handle, *args)
        except nvml.NVMLError as error:
            raise_if_gone(error)
            self.missing |= dict.fromkeys(fields.split(), str(error))
            return None

    def within(self, field: str, value: float | None, largest: float) -> float | None:
        """The value, or `None` with a reason where no card can say so: never clamped to what looks right."""
        if value is not None and not 0 <= value <= largest:
            self.missing[field] = f"the driver said {value:g}, which is out of range"
            return None
        return value


def raise_if_gone(error: nvml.NVMLError) -> None:
    if error.value in GONE:
        raise CardLost(f"The driver says: {error}.") from error
    if error.value in DRIVER_REPAIRS and error.value != nvml.NVML_ERROR_NO_PERMISSION:
        raise no_driver(error) from error


class NvmlBackend:
    """The cards of the driver of this host."""

    def __init__(self) -> None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise no_driver(error) from error
        self.handles: dict[str, Handle] = {}
        self.unreadable = 0

    def list_cards(self) -> list[CardInfo]:
        """Whole cards under the driver's own indexes, then the MIG instances of those that are split."""
        try:
            count = nvml.nvmlDeviceGetCount()
            versions = driver_version(), cuda_version()
        except nvml.NVMLError as error:
            raise no_driver(error) from error
        self.handles = {}
        found = [self._info(index, versions) for index in range(count)]
        cards = [card for card in found if card is not None]
        self.unreadable = count - len(cards)
        parts = [part for card in cards if card.mig_mode for part in self._instances(card)]
        return cards + [replace(part, index=count + number) for number, part in enumerate(parts)]

    def _info(self, index: int, versions: tuple[str | None, str | None]) -> CardInfo | None:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            info = card_info(Card(handle), uuid, index, versions)
        except nvml.NVMLError as error:
            if error.value not in GONE:
                raise_if_gone(error)
            return None
        except CardLost:
            return None
        self.handles[uuid] = handle
        return info

    def _instances(self, card: CardInfo) -> Iterator[CardInfo]:
        """What a split card is split into; empty slots are none. One that goes while it is asked is gone."""
        whole = self.handles[card.uuid]
        for slot in range(answer_or_none(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(whole)) or 0):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, slot)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                yield instance_info(Card(handle), uuid, card)
            except (nvml.NVMLError, CardLost):
                continue
            self.handles[uuid] = handle

    def read(self, uuid: str) -> CardReading:
        card = Card(self._handle(uuid))
        return said(instance_reading(card) if is_instance(uuid) else reading(card))

    def processes(self, uuid: str) -> list[GpuProcess]:
        return listed(self._handle(uuid))

    def lookup(self, uuid: str) -> CardInfo | None:
        return next((card for card in self.list_cards() if card.uuid == uuid), None)

    def _handle(self, uuid: str) -> Handle:
        if uuid not in self.handles:
            try:
                self.handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml.NVMLError as error:
                raise_if_gone(error)
                raise CardLost(not_opened(uuid, error)) from error
        return self.handles[uuid]


def not_opened(uuid: str, error: nvml.NVMLError) -> str:
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        return f"The driver says: {error}. {DRIVER_REPAIRS[error.value]}"
    return f"The driver does not open {uuid}: {error}."


# What a card is ---------------------------------------------------------------------------------------


def driver_version() -> str | None:
    return answer_or_none(nvml.nvmlSystemGetDriverVersion)


def cuda_version() -> str | None:
    """The newest CUDA that the driver runs, `13.0` for 13000."""
    number = answer_or_none(nvml.nvmlSystemGetCudaDriverVersion)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def answer_or_none(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except nvml.NVMLError:
        return None


def card_info(card: Card, uuid: str, index: int, versions: tuple[str | None, str | None]) -> CardInfo:
    pci = card.ask("pci_bus_id", nvml.nvmlDeviceGetPciInfo)
    capability = card.ask("compute_capability", nvml.nvmlDeviceGetCudaComputeCapability)
    mig = card.ask("mig_mode", nvml.nvmlDeviceGetMigMode)
    mode = card.ask("compute_mode", nvml.nvmlDeviceGetComputeMode)
    memory = memory_of(card)
    return CardInfo(
        uuid=uuid,
        index=index,
        name=card.ask("name", nvml.nvmlDeviceGetName) or "NVIDIA card",
        pci_bus_id=as_text(pci.busId) if pci else "",
        memory_total_bytes=memory.total if memory else None,
        driver_version=versions[0],
        cuda_version=versions[1],
        compute_capability="{}.{}".format(*capability) if capability else None,
        mig_mode=bool(mig[0]) if mig else None,
        compute_mode=COMPUTE_MODES.get(mode) if mode is not None else None,
        unified_memory=isinstance(memory, HostMemory),
    )


def instance_info(part: Card, uuid: str, card: CardInfo) -> CardInfo:
    """A MIG instance: its own name and memory, everything else as its card."""
    name, memory = part.ask("name", nvml.nvmlDeviceGetName), memory_of(part)
    place = [
        part.ask("", nvml.nvmlDeviceGetGpuInstanceId),
        part.ask("", nvml.nvmlDeviceGetComputeInstanceId),
    ]
    return replace(
        card,
        uuid=uuid,
        name=name or card.name,
        memory_total_bytes=memory.total if memory else None,
        mig_parent=card.uuid,
        mig_place=None if None in place else "{}/{}".format(*place),
    )


def as_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# What a card says -------------------------------------------------------------------------------------

MEMORY = "memory_total_bytes memory_used_bytes memory_free_bytes memory_reserved_bytes"


@dataclass(frozen=True)
class HostMemory:
    """What a card without memory of its own shares with the rest of the machine."""

    total: int
    free: int
    reserved: None = None

    @property
    def used(self) -> int:
        return self.total - self.free


def memory_of(card: Card) -> Any:
    """Version 2 tells the driver's own share apart from `used`, as `nvidia-smi` does; old drivers have only 1.

    Of an integrated device, which supports neither, the host's. Any other answer is none at all.
    """
    memory = device_memory(card)
    if memory is None and card.missing["memory_total_bytes"] == NOT_SUPPORTED and integrated(card):
        memory = HostMemory(*procfs.memory())
        card.missing = {field: why for field, why in card.missing.items() if field not in MEMORY.split()[:3]}
    return memory


def integrated(card: Card) -> bool:
    """Whether the driver says that the device walks the host's page tables, or its name is known for it."""
    if card.ask("", nvml.nvmlDeviceGetAddressingMode) == nvml.NVML_DEVICE_ADDRESSING_MODE_ATS:
        return True
    return not INTEGRATED.isdisjoint((card.ask("", nvml.nvmlDeviceGetName) or "").split())


def device_memory(card: Card) -> Any:
    newer = card.ask(MEMORY, nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2)
    if newer is not None:
        return newer
    older = card.ask(MEMORY, nvml.nvmlDeviceGetMemoryInfo)
    if older is not None:
        for field in MEMORY.split()[:3]:
            card.missing.pop(field)
    return older


def reading(card: Card) -> CardReading:
    """One sample; source and unit of each value stand in `gpus.readings`."""
    ask = card.ask
    load = ask("utilization_gpu_percent utilization_memory_percent", nvml.nvmlDeviceGetUtilizationRates)
    memory = memory_of(card)
    state = ask("performance_state", nvml.nvmlDeviceGetPerformanceState)
    return CardReading(
        utilization_gpu_percent=card.within("utilization_gpu_percent", load and load.gpu, 100),
        utilization_memory_percent=card.within("utilization_memory_percent", load and load.memory, 100),
        memory_total_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        memory_free_bytes=memory.free if memory else None,
        memory_reserved_bytes=getattr(memory, "reserved", None),
        temperature_celsius=card.within("temperature_celsius", temperature(card), HOTTEST_CELSIUS),
        temperature_slowdown_celsius=slowdown(card),
        power_draw_watts=watts(card, "power_draw_watts", nvml.nvmlDeviceGetPowerUsage),
        power_limit_watts=watts(card, "power_limit_watts", nvml.nvmlDeviceGetEnforcedPowerLimit),
        fan_percent=ask("fan_percent", nvml.nvmlDeviceGetFanSpeed),
        clock_sm_mhz=ask("clock_sm_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        clock_memory_mhz=ask("clock_memory_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        performance_state=f"P{state}" if state is not None and state != nvml.NVML_PSTATE_UNKNOWN else None,
        throttle_reasons=throttle_reasons(card),
        ecc_errors_uncorrected=ask(
            "ecc_errors_uncorrected",
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        pcie_generation=ask("pcie_generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_width=ask("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
        missing=card.missing,
    )


def instance_reading(part: Card) -> CardReading:
    """A MIG instance has memory of its own; load, heat and power are told of the whole card only."""
    memory = memory_of(part)
    untold = CardReading(
        memory_total_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        memory_free_bytes=memory.free if memory else None,
        memory_reserved_bytes=getattr(memory, "reserved", None),
    )
    rest = [
        name for name, said in untold.as_dict().items() if said in (None, []) and name not in MEMORY.split()
    ]
    return replace(untold, missing=part.missing | dict.fromkeys(rest, OF_THE_WHOLE))


def said(sample: CardReading) -> CardReading:
    """The reading, if there is anything in it: a card that tells nothing is not read."""
    values = vars(sample).items()
    if all(value in (None, []) for name, value in values if name != "missing"):
        raise CardSilent(
            f"The card tells none of its values (memory: {sample.missing['memory_used_bytes']})."
        )
    return sample


def temperature(card: Card) -> float | None:
    """The newer call first: the older one leaves with CUDA 14."""
    newer = card.ask("temperature_celsius", nvml.nvmlDeviceGetTemperatureV, nvml.NVML_TEMPERATURE_GPU)
    if newer is not None:
        return newer
    older = card.ask("temperature_celsius", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    if older is not None:
        card.missing.pop("temperature_celsius")
    return older


def slowdown(card: Card) -> float | None:
    return card.ask(
        "temperature_slowdown_celsius",
        nvml.nvmlDeviceGetTemperatureThreshold,
        nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    )


def watts(card: Card, field: str, question: Callable[[Handle], int]) -> float | None:
    """The driver counts milliwatts."""
    milliwatts = card.ask(field, question)
    return card.within(field, None if milliwatts is None else milliwatts / 1000, LARGEST_WATTS)


def throttle_reasons(card: Card) -> list[str]:
    bits = card.ask("throttle_reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
    return [name for bit, name in SLOWDOWNS.items() if (bits or 0) & bit]


# Who is on a card -------------------------------------------------------------------------------------


def listed(handle: Handle) -> list[GpuProcess]:
    """Compute first; a process that also draws is named once. Raises what the driver says of the compute list;
    the two other lists are extras that many cards do not keep. What is in an instance of a split card is listed there.
    """
    card = Card(handle)
    mig = card.ask("", nvml.nvmlDeviceGetMigMode)
    split = bool(mig and mig[0])
    found: dict[int, GpuProcess] = {}
    for kind, question in (
        ("compute", nvml.nvmlDeviceGetComputeRunningProcesses),
        ("mps", nvml.nvmlDeviceGetMPSComputeRunningProcesses),
        ("graphics", nvml.nvmlDeviceGetGraphicsRunningProcesses),
    ):
        entries: Iterable[Any] | None = card.ask(kind, question)
        for entry in entries or ():
            if split and entry.gpuInstanceId != NO_INSTANCE:
                continue
            found.setdefault(entry.pid, process(entry.pid, kind, entry.usedGpuMemory))
    if "compute" in card.missing:
        raise CardSilent(card.missing["compute"])
    return list(found.values())


def process(pid: int, kind: str, used: int | None) -> GpuProcess:
    """A pid of the driver is a hint: in a container it may be the host's number of somebody we cannot see."""
    known = procfs.stat(pid)
    return GpuProcess(
        pid, procfs.name_of(pid), procfs.user_of(pid), kind, used, known.state if known else None
    )
