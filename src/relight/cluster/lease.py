"""A Lease of Kubernetes, asked for with the service account of a pod: the shell around `relight.core.lease`."""

import asyncio
import datetime
import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from relight.core.lease import Read, Record, Stage, Tenure, Write
from relight.errors import UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_ANSWER_BYTES = 2**20
SHORTEST_WAIT_SECONDS = 0.02
_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REFUSALS = (401, 403, 404)  # worth no other try before the cluster is changed


class LeaseError(OSError):
    """The server gave no usable answer. Its text has the server's own words."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.is_refusal = status in _REFUSALS


def check_name(lease: str) -> None:
    """Raise UsageError unless a Lease can have this name, and this process a service account."""
    if not _NAME.fullmatch(lease):
        raise UsageError(f"--lease {lease}: expected NAME or NAMESPACE/NAME of a Lease of Kubernetes")
    missing = [name for name in ("token", "ca.crt", "namespace") if not (SERVICE_ACCOUNT / name).exists()]
    if "KUBERNETES_SERVICE_HOST" not in os.environ or missing:
        raise UsageError(
            f"--lease {lease}: this is no pod with a service account (it needs KUBERNETES_SERVICE_HOST and "
            f"{SERVICE_ACCOUNT}); `relight submit k8s` writes a manifest that has one"
        )


class Server(Protocol):
    """A place where one Lease is kept."""

    @property
    def patience_seconds(self) -> float:
        """Seconds for which an answer is awaited."""

    def perform(self, request: Read | Write, known: dict[str, Any]) -> tuple[Record | str, dict[str, Any]]:
        """Return the answer (a record, a new version, or an empty string for a conflict) and the object as it is now.

        `known` is the object of the last answer. Raises LeaseError.
        """


class LeaseServer:
    """One Lease at the API server. A connection for each request: there are few, and none must wait for another."""

    def __init__(self, lease: str, duration_seconds: int) -> None:
        """`lease` is NAME, in the namespace of this pod, or NAMESPACE/NAME."""
        self._lease = lease
        self._duration_seconds = duration_seconds

    @property
    def patience_seconds(self) -> float:
        """Seconds for which an answer is awaited."""
        return self._duration_seconds / 5

    def perform(self, request: Read | Write, known: dict[str, Any]) -> tuple[Record | str, dict[str, Any]]:
        """Send a request, and return what the server makes of it: see Server."""
        if isinstance(request, Read):
            _, found = self._ask("GET", None)
            return self._record(found), found
        status, found = self._ask("PUT", self._changed(known, request))
        if status == 409:
            return "", {}
        return self._record(found).version, found

    def _record(self, found: dict[str, Any]) -> Record:
        spec, version = found.get("spec") or {}, (found.get("metadata") or {}).get("resourceVersion")
        holder, duration = spec.get("holderIdentity") or "", spec.get("leaseDurationSeconds")
        if not isinstance(version, str) or not version or not isinstance(holder, str):
            raise LeaseError(f"the API server's Lease {self._lease} has no version")
        return Record(version, holder, float(duration if isinstance(duration, int) else self._duration_seconds))

    def _changed(self, known: dict[str, Any], request: Write) -> dict[str, Any]:
        spec, now = dict(known.get("spec") or {}), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        if request.holder and request.holder != spec.get("holderIdentity"):
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
        spec |= {"holderIdentity": request.holder, "leaseDurationSeconds": self._duration_seconds, "renewTime": now}
        return {**known, "metadata": {**known["metadata"], "resourceVersion": request.version}, "spec": spec}

    def _ask(self, method: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        try:
            namespace, _, name = self._lease.rpartition("/")
            namespace = namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
            headers = {"Authorization": f"Bearer {(SERVICE_ACCOUNT / 'token').read_text().strip()}"}  # it is renewed
            host = os.environ["KUBERNETES_SERVICE_HOST"]
            port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
            trust = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
            connection = http.client.HTTPSConnection(host, port, timeout=self.patience_seconds, context=trust)
            path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
            try:
                text = None if body is None else json.dumps(body).encode()
                connection.request(method, path, text, {**headers, "Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read(MAX_ANSWER_BYTES))
            finally:
                connection.close()
        except (OSError, KeyError, ValueError, http.client.HTTPException) as error:
            raise LeaseError(
                f"no answer about the Lease {self._lease}: {str(error) or type(error).__name__}"
            ) from error
        if not isinstance(answer, dict) or (response.status != 200 and (method, response.status) != ("PUT", 409)):
            words = answer.get("message") if isinstance(answer, dict) else None
            raise LeaseError(
                f"the Lease {self._lease}: status {response.status}, {words or 'no words'}", response.status
            )
        return response.status, answer


class LeaseKeeper:
    """Takes part in a Lease for this process, until it has held it and lost it."""

    def __init__(self, server: Server, name: str, duration_seconds: int, say: Callable[[str], None]) -> None:
        """`name`: see Tenure. `say` tells people once why the server is of no use."""
        self._server = server
        self._tenure = Tenure(name, duration_seconds)
        self._known: dict[str, Any] = {}
        self._say = say
        self._said = ""

    @property
    def holder(self) -> str:
        """The holder when the Lease was last read."""
        return self._tenure.holder

    def may_act(self) -> bool:
        """Return whether this process is the controller at this moment."""
        return self._tenure.may_act(_clock())

    async def acquire(self, still: Callable[[], bool] = lambda: True, *, insists: bool = False) -> bool:
        """Wait for the Lease while `still` holds; return whether it is held.

        Raises LeaseError if the server refuses it, unless this `insists`.
        """
        while still():
            if self._tenure.stage is not Stage.WAITING:
                return self.may_act()
            error = await self._advance()
            if error is not None and error.is_refusal and not insists:
                raise error
        return False

    async def keep(self) -> None:
        """Renew the Lease until it is lost."""
        while self._tenure.stage is Stage.HOLDING:
            await self._advance()

    def release(self) -> None:
        """Give the Lease up, if it is held; nothing else happens meanwhile. If that fails, others wait for its end."""
        request = self._tenure.release()
        if request is not None:
            try:
                self._server.perform(request, self._known)
            except LeaseError as error:
                self._tell(error)

    async def _advance(self) -> LeaseError | None:
        """Send what is due and take in the answer, or wait; return why there was none."""
        tenure = self._tenure
        request = tenure.advance(_clock())
        if request is None:
            if tenure.stage is not Stage.OVER:
                await asyncio.sleep(max(SHORTEST_WAIT_SECONDS, tenure.next_at - _clock()))
            return None
        try:
            answer = await self._perform(request)
        except LeaseError as error:
            tenure.take_failure(_clock())
            self._tell(error)
            return error
        self._said = ""
        match answer:
            case Record():
                tenure.take_record(answer, _clock())
            case "":
                tenure.take_conflict(_clock())
            case _:
                tenure.take_success(answer, _clock())
        return None

    async def _perform(self, request: Read | Write) -> Record | str:
        try:
            asking = asyncio.to_thread(self._server.perform, request, self._known)
            answer, self._known = await asyncio.wait_for(asking, self._server.patience_seconds)
        except TimeoutError:
            raise LeaseError(f"no answer within {self._server.patience_seconds:g} s") from None
        return answer

    def _tell(self, error: LeaseError) -> None:
        if str(error) != self._said:
            self._said = str(error)
            self._say(f"the controller's Lease cannot be kept now: {error}")


def _clock() -> float:
    """Seconds, also those for which the host was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
