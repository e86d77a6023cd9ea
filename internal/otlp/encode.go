package otlp

import (
	"strings"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/landfall-lb/landfall/internal/lb"
)

// scope names what the spans are made by.
const scope = "landfall.dev"

// encode returns the body of a request. TracesData has the form of an ExportTraceServiceRequest, whose
// package would bring gRPC along.
func encode(resource []lb.SpanAttribute, node string, spans []lb.Span) ([]byte, error) {
	all := &tracepb.ScopeSpans{Scope: &commonpb.InstrumentationScope{Name: scope}}
	for _, s := range spans {
		all.Spans = append(all.Spans, encodeSpan(node, s))
	}
	return proto.Marshal(&tracepb.TracesData{ResourceSpans: []*tracepb.ResourceSpans{{
		Resource:   &resourcepb.Resource{Attributes: encodeAttributes(resource)},
		ScopeSpans: []*tracepb.ScopeSpans{all},
	}}})
}

func encodeSpan(node string, s lb.Span) *tracepb.Span {
	trace, id := s.Trace(), s.ID(node)
	encoded := &tracepb.Span{
		TraceId: trace[:], SpanId: id[:], Name: string(s.Name), Kind: tracepb.Span_SPAN_KIND_INTERNAL,
		StartTimeUnixNano: uint64(s.Start.UnixNano()), EndTimeUnixNano: uint64(s.End.UnixNano()),
		Attributes: encodeAttributes(append([]lb.SpanAttribute{
			{Key: "k8s.namespace.name", Value: s.Service.Namespace}, {Key: "k8s.service.name", Value: s.Service.Name},
			{Key: "k8s.service.uid", Value: s.UID}, {Key: "server.address", Value: s.VIP.String()},
		}, s.Attributes...)),
	}
	if parent, ok := s.Parent(); ok {
		encoded.ParentSpanId = parent[:]
	}
	return encoded
}

// encodeAttributes leaves out what is not UTF-8, which the protocol does not carry: names of interfaces may
// have any bytes, and names of nodes come from gossip.
func encodeAttributes(attributes []lb.SpanAttribute) []*commonpb.KeyValue {
	encoded := make([]*commonpb.KeyValue, len(attributes))
	for i, a := range attributes {
		encoded[i] = &commonpb.KeyValue{Key: a.Key,
			Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: strings.ToValidUTF8(a.Value, "")}}}
	}
	return encoded
}
