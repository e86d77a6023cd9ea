package bfd

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// State is the state of a session (RFC 5880 section 4.1).
type State uint8

// The states, with the numbers that packets carry.
const (
	AdminDown State = iota // held down on purpose
	Down
	Init // the peer is heard and does not hear us yet
	Up
)

func (s State) String() string { return name(stateNames[:], s) }

var stateNames = [...]string{AdminDown: "AdminDown", Down: "Down", Init: "Init", Up: "Up"}

// Diagnostic is why a session last changed its state (RFC 5880 section 4.1).
type Diagnostic uint8

// The diagnostics, with the numbers that packets carry.
const (
	NoDiagnostic Diagnostic = iota
	DetectionExpired
	EchoFailed
	NeighborSignaledDown
	ForwardingPlaneReset
	PathDown
	ConcatenatedPathDown
	AdministrativelyDown
	ReverseConcatenatedPathDown
)

func (d Diagnostic) String() string { return name(diagnosticNames[:], d) }

// diagnosticNames are those of RFC 5880.
var diagnosticNames = [...]string{
	NoDiagnostic:                "No Diagnostic",
	DetectionExpired:            "Control Detection Time Expired",
	EchoFailed:                  "Echo Function Failed",
	NeighborSignaledDown:        "Neighbor Signaled Session Down",
	ForwardingPlaneReset:        "Forwarding Plane Reset",
	PathDown:                    "Path Down",
	ConcatenatedPathDown:        "Concatenated Path Down",
	AdministrativelyDown:        "Administratively Down",
	ReverseConcatenatedPathDown: "Reverse Concatenated Path Down",
}

func name[T ~uint8](names []string, v T) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("unknown (%d)", v)
}

// Packet is a BFD Control packet (RFC 5880 section 4.1). Of its optional authentication section
// only the presence is kept.
type Packet struct {
	Diagnostic                          Diagnostic
	State                               State
	Poll, Final, ControlPlane, Demand   bool
	Authenticated                       bool
	DetectMultiplier                    uint8
	MyDiscriminator, YourDiscriminator  uint32
	DesiredMinTx, RequiredMinRx, EchoRx time.Duration // whole microseconds, at most 4294 s
}

// Drop is why a received packet is not heeded.
type Drop uint8

// The reasons, in the order in which RFC 5880 section 6.8.6 has them checked.
const (
	dropNone            Drop = iota
	dropVersion              // another version of the protocol
	dropShort                // the length is less than that of the mandatory part
	dropTruncated            // the length is more than what arrived
	dropMultiplier           // detect multiplier zero
	dropMultipoint           // the multipoint bit is set
	dropMyDiscriminator      // My Discriminator is zero
	dropNoSession            // no session has Your Discriminator, or none is with that sender
	dropState                // Your Discriminator zero, which only a peer that is down may send
	// Your Discriminator zero, for a session that is up: the peer knows the discriminator, and whoever does not
	// may have made the packet up. A peer that begins anew is heeded once the detection time is over.
	dropUnproven
	// TTL or hop limit too low: the sender is further away than it may be (RFC 5881 section 5, RFC
	// 5883)
	dropTTL
	dropAuthentication // authenticated, and no session here is
	// dropInterface: it came in by an interface that does not lead to the peer, as from a pod of this node,
	// whose packets have not passed a router either (RFC 5881 section 3)
	dropInterface
	dropCount
)

func (d Drop) String() string { return name(dropNames[:], d) }

var dropNames = [dropCount]string{
	"none", "version", "short", "truncated", "multiplier", "multipoint", "my-discriminator", "no-session", "state",
	"unproven", "ttl", "authentication", "interface",
}

const (
	version       = 1
	packetLen     = 24 // of the mandatory part
	minAuthLen    = 26 // with the least authentication section
	bitPoll       = 1 << 5
	bitFinal      = 1 << 4
	bitControl    = 1 << 3
	bitAuth       = 1 << 2
	bitDemand     = 1 << 1
	bitMultipoint = 1 << 0
)

// decode reads a UDP payload: the checks of RFC 5880 section 6.8.6 that need no session, in their
// order.
func decode(b []byte) (Packet, Drop) {
	if len(b) < packetLen {
		return Packet{}, dropShort // nothing can be read of it, the version included
	}
	flags, length := b[1], int(b[3])
	switch {
	case b[0]>>5 != version:
		return Packet{}, dropVersion
	case length < packetLen, flags&bitAuth != 0 && length < minAuthLen:
		return Packet{}, dropShort
	case length > len(b):
		return Packet{}, dropTruncated
	}
	p := Packet{
		Diagnostic:        Diagnostic(b[0] & 0x1f),
		State:             State(flags >> 6),
		Poll:              flags&bitPoll != 0,
		Final:             flags&bitFinal != 0,
		ControlPlane:      flags&bitControl != 0,
		Authenticated:     flags&bitAuth != 0,
		Demand:            flags&bitDemand != 0,
		DetectMultiplier:  b[2],
		MyDiscriminator:   binary.BigEndian.Uint32(b[4:]),
		YourDiscriminator: binary.BigEndian.Uint32(b[8:]),
		DesiredMinTx:      microseconds(b[12:]),
		RequiredMinRx:     microseconds(b[16:]),
		EchoRx:            microseconds(b[20:]),
	}
	switch {
	case p.DetectMultiplier == 0:
		return Packet{}, dropMultiplier
	case flags&bitMultipoint != 0:
		return Packet{}, dropMultipoint
	case p.MyDiscriminator == 0:
		return Packet{}, dropMyDiscriminator
	}
	return p, dropNone
}

// append adds the 24 bytes of the packet to b. An authentication section is never written.
func (p Packet) append(b []byte) []byte {
	flags := byte(p.State) << 6
	for _, bit := range [...]struct {
		set bool
		bit byte
	}{{p.Poll, bitPoll}, {p.Final, bitFinal}, {p.ControlPlane, bitControl}, {p.Demand, bitDemand}} {
		if bit.set {
			flags |= bit.bit
		}
	}
	b = append(b, version<<5|byte(p.Diagnostic)&0x1f, flags, p.DetectMultiplier, packetLen)
	b = binary.BigEndian.AppendUint32(b, p.MyDiscriminator)
	b = binary.BigEndian.AppendUint32(b, p.YourDiscriminator)
	for _, d := range [...]time.Duration{p.DesiredMinTx, p.RequiredMinRx, p.EchoRx} {
		b = binary.BigEndian.AppendUint32(b, uint32(min(d/time.Microsecond, math.MaxUint32)))
	}
	return b
}

func microseconds(b []byte) time.Duration {
	return time.Duration(binary.BigEndian.Uint32(b)) * time.Microsecond
}
