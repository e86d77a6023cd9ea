// Package story draws what happens to a cluster in a run of chaos: planned changes, churn and faults, from a seed. It
// is pure: the same seed gives the same story, and a part of a story is a story.
package story

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Kind is what an event does.
type Kind string

// Planned changes and harmless faults, which lose no connection. Only calm rounds hold them.
const (
	// DrainLabel excludes a node from external load balancing by its label, and takes the label off again.
	DrainLabel Kind = "drain-label"
	// DrainTaint does it with the cluster autoscaler's taint.
	DrainTaint Kind = "drain-taint"
	// Stop ends a program by SIGTERM, as an upgrade does, and starts it again.
	Stop Kind = "stop"
	// StopLong ends a speaker like Stop, for longer than its addresses are kept for it, while clients forget the way.
	StopLong Kind = "stop-long"
	// Kill ends a program by SIGKILL and starts it again.
	Kill Kind = "kill"
	// RollPod moves one pod of a Service: a new one is ready before the old one terminates.
	RollPod Kind = "roll-pod"
	// StopAPI takes the API server away.
	StopAPI Kind = "stop-api"
	// FreezeAPI stops the API server without its ending: requests hang.
	FreezeAPI Kind = "freeze-api"
	// FreezeEtcd does so with etcd.
	FreezeEtcd Kind = "freeze-etcd"
	// MalformedARP sends broken ARP packets to the LAN.
	MalformedARP Kind = "malformed-arp"
	// HungProxy freezes the proxies of some nodes and creates a Service meanwhile.
	HungProxy Kind = "hung-proxy"
	// EditPool gives a pool more addresses, and takes the additional ones away again.
	EditPool Kind = "edit-pool"
	// ShiftClock sets the wall clock of a node's programs, or of the controller, wrong by [Event.By].
	ShiftClock Kind = "shift-clock"
	// SlowAPI lets the API server run for a tenth of the time.
	SlowAPI Kind = "slow-api"
	// AddPeer adds a BGP peer that does not answer, and removes it.
	AddPeer Kind = "add-peer"
	// ForeignRules has other software make and remove large tables in nftables, of which the kernel tells everyone.
	ForeignRules Kind = "foreign-rules"
)

// Faults that may cost connections until they have healed. Only storms hold them.
const (
	// Cut takes a node off the LAN without its noticing.
	Cut Kind = "cut"
	// Unplug takes the carrier off a node's interface.
	Unplug Kind = "unplug"
	// Crash is Unplug, with all programs of the node killed and its rules and connections forgotten.
	Crash Kind = "crash"
	// FreezeNode stops the speaker and the proxy of a node.
	FreezeNode Kind = "freeze-node"
	// FreezeSpeaker stops the speaker alone, FreezeRelay the relay.
	FreezeSpeaker Kind = "freeze-speaker"
	FreezeRelay   Kind = "freeze-relay"
	// Lossy drops some of the packets that a node receives.
	Lossy Kind = "lossy"
	// DropGossipIn and DropGossipOut are partitions in one direction, and DropGossip in both, of the gossip alone.
	DropGossipIn  Kind = "drop-gossip-in"
	DropGossipOut Kind = "drop-gossip-out"
	DropGossip    Kind = "drop-gossip"
	// Deaf has a node hear nothing from the other nodes, while they hear it.
	Deaf Kind = "deaf"
	// Mute has the other nodes hear nothing from a node, while it hears them.
	Mute Kind = "mute"
	// DeleteRules has other software delete all rules of a node.
	DeleteRules Kind = "delete-rules"
	// ForeignElements has other software remove what maps of a node's rules hold, and leave the rules: single messages of
	// the proxy, which change what is not there, are refused then.
	ForeignElements Kind = "foreign-elements"
	// NetlinkErrors has the kernel refuse some of what a node's proxy sends over netlink, and lose some of the answers.
	NetlinkErrors Kind = "netlink-errors"
	// FlushConntrack has other software delete all connections of a node from conntrack.
	FlushConntrack Kind = "flush-conntrack"
	// KillRouter ends the router's BGP daemon and starts it again; FreezeRouter stops it.
	KillRouter   Kind = "kill-router"
	FreezeRouter Kind = "freeze-router"
	// Spoof has a host announce an address of a Service over ARP as its own.
	Spoof Kind = "spoof"
	// SpoofOn has it do so ten times a second, over ARP and NDP.
	SpoofOn Kind = "spoof-on"
	// ConntrackFull has a node drop the first packet of each connection, as a kernel does whose table is full.
	ConntrackFull Kind = "conntrack-full"
	// NoDescriptors lets a program open no file and no socket.
	NoDescriptors Kind = "no-descriptors"
	// FullDisk restarts a program where it can make no file, again and again.
	FullDisk Kind = "full-disk"
	// FillDisk lets a running program make no file.
	FillDisk Kind = "fill-disk"
	// SlowEtcd lets etcd run for a tenth of the time, KillEtcd ends it and starts it again.
	SlowEtcd Kind = "slow-etcd"
	KillEtcd Kind = "kill-etcd"
	// RestoreEtcd puts etcd back to what it held when the event began.
	RestoreEtcd Kind = "restore-etcd"
	// RemovePeer deletes the BGP peers, and makes them again.
	RemovePeer Kind = "remove-peer"
	// LeaveNode ends the programs of a node as an upgrade does, deletes its Node, and brings both back.
	LeaveNode Kind = "leave-node"
	// StormClock, StormSlowAPI, StormStop, StormKill, StormAPI and StormEtcd are what calm rounds have too, here
	// beside other faults. KillRelay does to a relay what StormKill does to other programs.
	StormStop    Kind = "storm-stop"
	StormKill    Kind = "storm-kill"
	KillRelay    Kind = "kill-relay"
	StormAPI     Kind = "storm-api"
	StormEtcd    Kind = "storm-etcd"
	StormClock   Kind = "storm-clock"
	StormSlowAPI Kind = "storm-slow-api"
)

// Churn, which both kinds of rounds hold.
const (
	// AddService creates a Service of its own, RemoveService deletes it.
	AddService    Kind = "add-service"
	RemoveService Kind = "remove-service"
	// Unready takes the readiness of all pods of a Service that is there for that, Ready gives it back.
	Unready Kind = "unready"
	Ready   Kind = "ready"
	// Burst changes that Service and the readiness of one of its pods again and again, as fast as the API server takes it.
	Burst Kind = "burst"
	// Flood creates many Services at once, more than there are addresses for, and deletes them.
	Flood Kind = "flood"
)

// IsChurn reports whether an event of the kind is churn.
func (k Kind) IsChurn() bool {
	return slices.Contains([]Kind{AddService, RemoveService, Unready, Ready, Burst, Flood}, k)
}

// TakesNode reports whether a fault of the kind takes one node away, or the speaker of one, so that another node has to
// take over what it announced. A program that ends by itself is judged by [Stop] and [Kill].
func (k Kind) TakesNode() bool {
	return slices.Contains([]Kind{Cut, Unplug, Crash, FreezeNode, FreezeSpeaker}, k)
}

// Event is one thing that happens.
type Event struct {
	// ID is the event's place in the whole story, from 1; parts of a story keep it.
	ID int `json:"id"`
	// At is when it begins, since the beginning of the round. For is how long a fault stays; 0 for what stays
	// or ends by itself.
	At  time.Duration `json:"at"`
	For time.Duration `json:"for,omitempty"`
	// Kind is what happens, to Node, to Program there, or to Service; those that it concerns are set.
	Kind    Kind   `json:"kind"`
	Node    string `json:"node,omitempty"`
	Program string `json:"program,omitempty"`
	Service string `json:"service,omitempty"`
	// Nodes are more nodes, for [HungProxy].
	Nodes []string `json:"nodes,omitempty"`
	// By is how far ahead a clock is set, or back if it is negative.
	By time.Duration `json:"by,omitempty"`
}

// String says it in a few words.
func (e Event) String() string {
	words := []string{fmt.Sprintf("#%d %s", e.ID, e.Kind)}
	for _, w := range append([]string{e.Program, e.Service, e.Node}, e.Nodes...) {
		if w != "" {
			words = append(words, w)
		}
	}
	if e.By != 0 {
		words = append(words, "by "+e.By.String())
	}
	if e.For > 0 {
		words = append(words, "for "+e.For.String())
	}
	return strings.Join(words, " ")
}

// Round is a part of a story, after which the cluster is left alone until it has settled.
type Round struct {
	// Number is the round's, from 1; parts of a story keep it.
	Number int `json:"number"`
	// Calm rounds have one planned change or harmless fault after the other: no connection may fail. Storms have
	// faults that overlap.
	Calm   bool    `json:"calm"`
	Events []Event `json:"events"`
}

// Config is what a run is configured with.
type Config struct {
	// Mode is how proxies program the kernel: nftables or iptables.
	Mode string `json:"mode"`
	// Direct has two Services forwarded directly, which nftables mode can.
	Direct bool `json:"direct,omitempty"`
}

// String says it in a few words.
func (c Config) String() string {
	if c.Direct {
		return c.Mode + ", direct forwarding"
	}
	return c.Mode
}

// Story is a run.
type Story struct {
	Seed   uint64  `json:"seed"`
	Config Config  `json:"config"`
	Rounds []Round `json:"rounds"`
}

// Cast is what things happen to.
type Cast struct {
	// Nodes are those that announce addresses. Programs run on each of them.
	// Graceful are more programs, whose end costs no connection if it is not sudden.
	Nodes, Programs, Graceful []string
	// Services are always there; their pods roll. Idle is one whose pods may all be unready.
	Services []string
	Idle     string
	// Router is whether a router speaks BGP.
	Router bool
}

// New returns a seed's story before its first round.
func New(seed uint64) Story { return Story{Seed: seed, Config: configOf(seed)} }

// Draw draws the rounds of a seed's story, calm ones and storms by turns, without end.
func Draw(seed uint64, cast Cast) iter.Seq[Round] {
	return func(yield func(Round) bool) {
		g := &generator{rand: rand.New(rand.NewPCG(seed, 0x6c616e6466616c6c)), cast: cast,
			variant: rand.New(rand.NewPCG(seed, 0x76617269616e74))}
		for n := 1; yield(g.round(n)); n++ {
		}
	}
}

// Generate draws a story of so many rounds.
func Generate(seed uint64, cast Cast, rounds int) Story {
	return upTo(seed, cast, func(r Round) bool { return r.Number > rounds })
}

// With returns the part of a seed's story with these events.
func With(seed uint64, cast Cast, ids []int) Story {
	if len(ids) == 0 {
		return New(seed)
	}
	last := slices.Max(ids)
	return upTo(seed, cast, func(r Round) bool { return r.Events[0].ID > last }).Only(ids)
}

// upTo draws a story's rounds before the first that is beyond its end.
func upTo(seed uint64, cast Cast, beyond func(Round) bool) Story {
	s := New(seed)
	for r := range Draw(seed, cast) {
		if beyond(r) {
			break
		}
		s.Rounds = append(s.Rounds, r)
	}
	return s
}

// configOf draws what a run is configured with: each second one uses direct forwarding, and each fourth iptables.
func configOf(seed uint64) Config {
	r := rand.New(rand.NewPCG(seed, 0x636f6e666967))
	return []Config{{Mode: "nftables"}, {Mode: "nftables", Direct: true}, {Mode: "nftables", Direct: true},
		{Mode: "iptables"}}[r.IntN(4)]
}

// Alone returns the only fault of a storm, whatever churn is beside it.
func (r Round) Alone() (fault Event, alone bool) {
	for _, e := range r.Events {
		if e.Kind.IsChurn() {
			continue
		}
		if alone {
			return Event{}, false
		}
		fault, alone = e, true
	}
	return fault, alone && !r.Calm
}

// Only returns the part of a story with these events, without the rounds that are then empty.
func (s Story) Only(ids []int) Story {
	part := Story{Seed: s.Seed, Config: s.Config}
	for _, r := range s.Rounds {
		events := slices.DeleteFunc(slices.Clone(r.Events), func(e Event) bool { return !slices.Contains(ids, e.ID) })
		if len(events) > 0 {
			part.Rounds = append(part.Rounds, Round{Number: r.Number, Calm: r.Calm, Events: events})
		}
	}
	return part
}

// Until returns the rounds up to one.
func (s Story) Until(number int) Story {
	return Story{Seed: s.Seed, Config: s.Config,
		Rounds: slices.DeleteFunc(slices.Clone(s.Rounds), func(r Round) bool { return r.Number > number })}
}

// IDs returns the events' numbers.
func (s Story) IDs() []int {
	var ids []int
	for _, r := range s.Rounds {
		for _, e := range r.Events {
			ids = append(ids, e.ID)
		}
	}
	return ids
}
