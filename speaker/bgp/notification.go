package bgp

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// notification is the content of a NOTIFICATION message (RFC 4271 section 4.5).
type notification struct {
	code, subcode uint8
	data          []byte
}

// protocolError is a fault that the peer is told of by a NOTIFICATION, which ends the session.
type protocolError struct {
	notification
	why string
}

func (e *protocolError) Error() string {
	s := "sent NOTIFICATION " + e.notification.String()
	if e.why != "" {
		s += ": " + e.why
	}
	return s
}

// peerError is a NOTIFICATION that the peer has sent.
type peerError struct{ notification }

func (e *peerError) Error() string { return "received NOTIFICATION " + e.notification.String() }

func fault(code, subcode uint8, data []byte, format string, args ...any) *protocolError {
	return &protocolError{notification{code, subcode, data}, fmt.Sprintf(format, args...)}
}

// faultOf turns an error of the packet library into one that the peer is told of.
func faultOf(err error) *protocolError {
	var m *bgp.MessageError
	if !errors.As(err, &m) || m.TypeCode == 0 {
		return fault(bgp.BGP_ERROR_UPDATE_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_MALFORMED_ATTRIBUTE_LIST, nil, "%v", err)
	}
	return fault(m.TypeCode, m.SubTypeCode, m.Data, "%s", m.Message)
}

// names of error codes and subcodes (IANA, BGP Error Codes).
var codeNames = map[uint8]struct {
	name     string
	subcodes map[uint8]string
}{
	1: {"Message Header Error", map[uint8]string{1: "Connection Not Synchronized", 2: "Bad Message Length",
		3: "Bad Message Type"}},
	2: {"OPEN Message Error", map[uint8]string{
		1: "Unsupported Version Number", 2: "Bad Peer AS", 3: "Bad BGP Identifier", 4: "Unsupported Optional Parameter",
		5: "Authentication Failure", 6: "Unacceptable Hold Time", 7: "Unsupported Capability", 8: "Grouping Conflict",
		11: "Role Mismatch",
	}},
	3: {"UPDATE Message Error", map[uint8]string{
		1: "Malformed Attribute List", 2: "Unrecognized Well-known Attribute", 3: "Missing Well-known Attribute",
		4: "Attribute Flags Error", 5: "Attribute Length Error", 6: "Invalid ORIGIN Attribute", 7: "AS Routing Loop",
		8: "Invalid NEXT_HOP Attribute", 9: "Optional Attribute Error", 10: "Invalid Network Field", 11: "Malformed AS_PATH",
	}},
	4: {"Hold Timer Expired", nil},
	5: {"Finite State Machine Error", map[uint8]string{
		1: "Receive Unexpected Message in OpenSent State", 2: "Receive Unexpected Message in OpenConfirm State",
		3: "Receive Unexpected Message in Established State",
	}},
	6: {"Cease", map[uint8]string{
		1: "Maximum Number of Prefixes Reached", 2: "Administrative Shutdown", 3: "Peer De-configured",
		4: "Administrative Reset",
		5: "Connection Rejected", 6: "Other Configuration Change", 7: "Connection Collision Resolution",
		8: "Out of Resources",
		9: "Hard Reset", 10: "BFD Down",
	}},
	7: {"ROUTE-REFRESH Message Error", map[uint8]string{1: "Invalid Message Length"}},
	8: {"Send Hold Timer Expired", nil},
}

// subcodes that the packet library has no constants for.
const (
	subPeerDeconfigured    = 3
	subAdministrativeStop  = 2
	subConfigurationChange = 6
	subCollision           = 7  // RFC 4486
	subBFDDown             = 10 // RFC 9384
	subUnexpectedOpenSent  = 1  // RFC 6608
	subUnexpectedConfirm   = 2
	subUnexpectedUp        = 3
	codeSendHoldTimer      = 8 // RFC 9687
)

// String names code and subcode as their RFCs do, and quotes what an administrator says of a
// shutdown (RFC 9003).
func (n notification) String() string {
	entry, ok := codeNames[n.code]
	if !ok {
		return fmt.Sprintf("code %d subcode %d", n.code, n.subcode)
	}
	s := entry.name
	if sub, ok := entry.subcodes[n.subcode]; ok {
		s += "/" + sub
	} else if n.subcode != 0 {
		s += fmt.Sprintf("/subcode %d", n.subcode)
	}
	if said := n.communication(); said != "" {
		s += fmt.Sprintf(" %q", said)
	}
	return s
}

func (n notification) communication() string {
	if n.code != bgp.BGP_ERROR_CEASE || n.subcode != 2 && n.subcode != 4 || len(n.data) == 0 ||
		int(n.data[0]) > len(n.data)-1 {
		return ""
	}
	return strings.ToValidUTF8(string(n.data[1:1+int(n.data[0])]), "?")
}

// shutdownText is the data of a Cease that says in words why.
func shutdownText(s string) []byte { return append([]byte{byte(len(s))}, s...) }

// notTaken is the fault of a peer that does not read (RFC 9687).
func notTaken(limit time.Duration) error {
	return fault(codeSendHoldTimer, 0, nil, "the peer has not taken what was sent for %v", limit)
}
