"""Spans of OpenTelemetry, from a client's trace through the Router to the replica. Off, they cost nothing.

A Router takes up the `traceparent` of a request (W3C trace context), and sends it on with each
submission, so the spans of the replica are children of the Router's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import Span

Carrier: TypeAlias = dict[str, str]
"""Headers of W3C trace context: `traceparent` and perhaps `tracestate`; empty where nothing is traced."""

NAME = "stepahead"

_propagator = TraceContextTextMapPropagator()


def tracer_to(provider: TracerProvider | None) -> Tracer:
    """A tracer whose spans go to `provider`; None: nowhere."""
    return (provider or NoOpTracerProvider()).get_tracer(NAME)


def otlp_provider(service: str) -> TracerProvider:
    """Sends spans to the collector that the standard OTEL_EXPORTER_OTLP_* variables name.

    Raises `RuntimeError` where the packages for it are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise RuntimeError(f"telemetry.tracing needs `pip install stepahead[tracing]`: {error}") from error
    provider = SdkTracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def received(carrier: Mapping[str, str]) -> Context:
    """The context that a peer has sent; an empty one if it has sent none, or none that can be read."""
    return _propagator.extract(carrier, Context())


def sent_with(span: Span) -> Carrier:
    """What makes a peer's spans children of this one.

    Of a trace that is not recorded, too: whoever is told nothing would begin one of its own.
    """
    carrier: Carrier = {}
    if span.get_span_context().is_valid:
        _propagator.inject(carrier, set_span_in_context(span))
    return carrier


def child_of(span: Span) -> Any:
    return set_span_in_context(span)
