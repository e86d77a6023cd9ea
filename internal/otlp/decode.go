package otlp

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// rejection is what a collector says that has taken a request and left out some of its spans: the
// ExportTracePartialSuccess of OTLP. Another attempt would be answered in the same way.
type rejection struct {
	spans   int
	message string
}

func (r rejection) Error() string {
	return fmt.Sprintf("the collector has rejected %d spans: %.200q", r.spans, r.message)
}

// The numbers of the fields, the same in the answer and in the partial success within: partial_success;
// rejected_spans, error_message.
const (
	fieldPartial  = 1
	fieldRejected = 1
	fieldMessage  = 2
)

// decodeRejection reads the answer to a request, an ExportTraceServiceResponse, whose package would bring gRPC
// along. An answer that is none, or is cut short, says as much as could be read.
func decodeRejection(answer []byte) rejection {
	var r rejection
	fields(answer, func(number protowire.Number, _ uint64, partial []byte) {
		if number == fieldPartial {
			fields(partial, func(number protowire.Number, n uint64, text []byte) {
				switch number {
				case fieldRejected:
					r.spans = int(min(n, math.MaxInt32))
				case fieldMessage:
					r.message = string(text)
				}
			})
		}
	})
	return r
}

// fields calls f with each number and each text of a message, until there is something that it cannot read.
func fields(message []byte, f func(number protowire.Number, n uint64, text []byte)) {
	for len(message) > 0 {
		number, kind, length := protowire.ConsumeTag(message)
		if length < 0 {
			return
		}
		message = message[length:]
		var n uint64
		var text []byte
		switch kind {
		case protowire.VarintType:
			n, length = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			text, length = protowire.ConsumeBytes(message)
		default:
			length = protowire.ConsumeFieldValue(number, kind, message)
		}
		if length < 0 {
			return
		}
		message = message[length:]
		f(number, n, text)
	}
}
