package bgp

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

const (
	headerLength  = 19
	maxMessage    = 4096 // RFC 4271 section 4.1
	markerLength  = 16
	updateMinimum = 23
)

// message is one received message without its header.
type message struct {
	kind uint8
	body []byte // valid until the next message is read
}

// reader reads messages. Faults in headers come as protocolErrors (RFC 4271 section 6.1).
type reader struct {
	from io.Reader
	buf  [maxMessage]byte
}

func (r *reader) next() (message, error) {
	header := r.buf[:headerLength]
	if _, err := io.ReadFull(r.from, header); err != nil {
		return message{}, err
	}
	for _, b := range header[:markerLength] {
		if b != 0xff {
			return message{},
				fault(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_CONNECTION_NOT_SYNCHRONIZED, nil,
					"the marker is not all ones")
		}
	}
	length, kind := binary.BigEndian.Uint16(header[markerLength:]), header[headerLength-1]
	if err := checkHeader(length, kind); err != nil {
		return message{}, err
	}
	body := r.buf[headerLength:length]
	if _, err := io.ReadFull(r.from, body); err != nil {
		return message{}, err
	}
	return message{kind, body}, nil
}

func checkHeader(length uint16, kind uint8) error {
	least := map[uint8]uint16{
		bgp.BGP_MSG_OPEN: 29, bgp.BGP_MSG_UPDATE: updateMinimum, bgp.BGP_MSG_NOTIFICATION: 21,
		bgp.BGP_MSG_KEEPALIVE:     headerLength,
		bgp.BGP_MSG_ROUTE_REFRESH: 23,
	}
	shortest, known := least[kind]
	switch {
	case length < headerLength || length > maxMessage,
		known && length < shortest,
		kind == bgp.BGP_MSG_KEEPALIVE && length != headerLength:
		return fault(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH,
			binary.BigEndian.AppendUint16(nil, length),
			"a message of type %d with %d bytes", kind, length)
	case !known:
		return fault(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_BAD_MESSAGE_TYPE, []byte{kind}, "message type %d",
			kind)
	}
	return nil
}

// decode decodes a body into m. The packet library is not trusted with hostile bytes: a panic in it
// is a malformed message.
func decode(m bgp.BGPBody, body []byte) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("cannot be decoded: %v", r)
		}
	}()
	return m.DecodeFromBytes(body)
}

func keepalive() []byte {
	b, _ := bgp.NewBGPKeepAliveMessage().Serialize()
	return b
}

func (n notification) serialize() []byte {
	data := n.data
	if most := maxMessage - headerLength - 2; len(data) > most {
		data = data[:most]
	}
	b, _ := bgp.NewBGPNotificationMessage(n.code, n.subcode, data).Serialize()
	return b
}

// received returns the content of a NOTIFICATION.
func received(body []byte) *peerError {
	return &peerError{notification{code: body[0], subcode: body[1], data: append([]byte(nil), body[2:]...)}}
}

func routeRefresh(afi uint16) []byte {
	b, _ := bgp.NewBGPRouteRefreshMessage(afi, 0, bgp.SAFI_UNICAST).Serialize()
	return b
}

func countMessages(b []byte) (messages, updates uint64) {
	for len(b) >= headerLength {
		messages++
		if b[headerLength-1] == bgp.BGP_MSG_UPDATE {
			updates++
		}
		b = b[int(b[markerLength])<<8|int(b[markerLength+1]):]
	}
	return messages, updates
}
