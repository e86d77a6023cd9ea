package explain

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Agent is what is known of Landfall's programs on one node.
type Agent struct {
	Node                  string
	Speaker, Proxy, Relay Program
	// Said and Delivers are the answers of the two; nil if they were not asked, or did not answer.
	Said     *SpeakerStatus
	Delivers *ProxyStatus
	// Reach says how far clients of the Service in question get; nil if the node was not asked.
	Reach *lb.Reach
}

// Program is one of the programs as the API server shows its container.
type Program struct {
	// There is false if no pod on the node has it.
	There          bool
	Running, Ready bool
	// Why says why it does not run, Unanswered why it did not answer.
	Why, Unanswered string
	Image           string
}

// NoAnswer begins what Unanswered says of a program that was reached and did not answer in time.
const NoAnswer = "no answer within "

// silent reports whether a program did not answer in time; if it could not be asked at all, nothing is known of it.
func (p Program) silent() bool { return strings.Contains(p.Unanswered, NoAnswer) }

// SpeakerStatus is the part of "landfall-speaker status" that a diagnosis reads.
type SpeakerStatus struct {
	Node     string `json:"node"`
	Waiting  string `json:"waiting"`
	Stopping bool   `json:"stopping"`
	Gate     struct {
		Kind      string    `json:"kind"`
		Reason    lb.Reason `json:"reason"`
		Connected bool      `json:"connected"`
	} `json:"gate"`
	Members struct {
		Joined   bool     `json:"joined"`
		Live     []string `json:"live"`
		Missing  []string `json:"missing"`
		Strange  []string `json:"withoutSpeaker"`
		Majority bool     `json:"majority"`
		Trouble  string   `json:"trouble"`
	} `json:"members"`
	Interfaces []Interface  `json:"interfaces"`
	BGP        BGPStatus    `json:"bgp"`
	Findings   []lb.Finding `json:"findings"`
	// Withheld are VIPs that the node does not announce for a cause in the node itself, one for each
	// reason.
	Withheld []Withheld `json:"withheld"`
	// Answering counts the VIPs that the node answers for; Parting are those that it announces although it should not.
	Answering int          `json:"answering"`
	Parting   Parting      `json:"parting"`
	VIPs      []SpeakerVIP `json:"vips"`
}

// Parting counts the VIPs that a node which drains announces as no other node does, and names the Services of some.
type Parting struct {
	Count    int      `json:"count"`
	Services []string `json:"services"`
}

// Addresses says how many addresses of which Services they are.
func (p Parting) Addresses() string {
	return addresses(p.Count) + ", of Services " + list(p.Services, 4)
}

func addresses(n int) string {
	if n == 1 {
		return "1 address"
	}
	return fmt.Sprint(n, " addresses")
}

// stillAnnounces says what a node that drains announces; "" if nothing, or if that is not known.
func (a Agent) stillAnnounces() string {
	if a.Said == nil {
		return ""
	}
	n := a.Said.Answering
	for _, p := range a.Said.BGP.Peers {
		if p.Session != nil {
			n = max(n, p.Session.Prefixes)
		}
	}
	switch away := a.Said.BGP.Leaving - n; {
	case a.Said.Parting.Count > 0:
		return "announces only what no other node delivers: " + a.Said.Parting.Addresses()
	case n > 0 && away > 0:
		return "announces " + addresses(n) + " until other nodes have taken over, and " + addresses(away) +
			" more to its routers once they are back"
	case n > 0:
		return "announces " + addresses(n) + " until other nodes have taken over"
	case away > 0:
		return "announces " + addresses(away) + " to its routers once they are back, until other nodes do"
	}
	return ""
}

// Withheld says why a node does not announce a VIP, and for how many that holds.
type Withheld struct {
	VIP   netip.Addr `json:"vip"`
	Count int        `json:"count"`
	lb.Refusal
}

// Interface is an interface of a node.
type Interface struct {
	Name      string         `json:"name"`
	Up        bool           `json:"up"`
	MTU       int            `json:"mtu"`
	Addresses []netip.Prefix `json:"addresses"`
	Problem   string         `json:"problem"`
}

// BGPStatus has the sessions of a node.
type BGPStatus struct {
	Waiting string       `json:"waiting"`
	Peers   []PeerStatus `json:"peers"`
	// Leaving counts the VIPs whose announcement is about to end, also while no peer is there to hear them.
	Leaving int `json:"leaving"`
}

// PeerStatus is a session of a node.
type PeerStatus struct {
	Name    string      `json:"name"`
	Refusal *lb.Refusal `json:"refusal"`
	Session *struct {
		State     string    `json:"state"`
		Since     time.Time `json:"since"`
		Reason    lb.Reason `json:"reason"`
		LastError string    `json:"lastError"`
		Prefixes  int       `json:"prefixes"`
		// Returned is how many prefixes of this AS the peer announces itself.
		Returned int `json:"returned"`
		Flaps    int `json:"flaps"`
	} `json:"session"`
	Uptime string `json:"uptime"`
}

// SpeakerVIP is what a speaker says of one VIP.
type SpeakerVIP struct {
	VIP       netip.Addr `json:"vip"`
	Services  []string   `json:"services"`
	Owner     string     `json:"owner"`
	Answering []string   `json:"answering"`
	Probing   bool       `json:"probing"`
	Nodes     []NodeVIP  `json:"nodes"`
	Routes    *struct {
		Prefixes []netip.Prefix `json:"prefixes"`
		Peers    []string       `json:"peers"`
		// Confirming are the peers that announce the prefixes back to the node.
		Confirming []string    `json:"confirming"`
		Refusal    *lb.Refusal `json:"refusal"`
	} `json:"routes"`
}

// NodeVIP says why one node does or does not announce a VIP.
type NodeVIP struct {
	Node      string    `json:"node"`
	Reason    lb.Reason `json:"reason"`
	Message   string    `json:"message"`
	Claims    bool      `json:"claims"`
	Answering bool      `json:"answering"`
	Peers     []string  `json:"peers"`
}

// ProxyStatus is the part of "landfall-proxy status" that a diagnosis reads.
type ProxyStatus struct {
	Node     string         `json:"node"`
	Mode     string         `json:"mode"`
	Waiting  string         `json:"waiting"`
	Ready    bool           `json:"ready"`
	Findings []lb.Finding   `json:"findings"`
	Relay    *ProxyRelay    `json:"relay"` // nil on a node without one
	Services []ProxyService `json:"services"`
}

// ProxyRelay is what a proxy says of its node's relay.
type ProxyRelay struct {
	Connected   bool                         `json:"connected"`
	Full        bool                         `json:"full"`
	Leads       map[lb.Family]netip.AddrPort `json:"leads"`
	LeadsUDP    map[lb.Family]netip.AddrPort `json:"leadsUDP"`
	Connections int                          `json:"connections"`
	Message     string                       `json:"message"`
}

// ProxyService is what a proxy says of one Service.
type ProxyService struct {
	Service    string            `json:"service"`
	State      string            `json:"state"`
	Error      string            `json:"error"`
	Advice     string            `json:"advice"`
	VIPs       []ProxyVIP        `json:"vips"`
	HealthPort uint16            `json:"healthPort"`
	LocalReady map[lb.Family]int `json:"localReady"`
	Relayed    bool              `json:"relayed"`
	Probe      *ProxyProbe       `json:"probe"` // nil if the node probes no endpoints of the Service
	// Counters are what the node's kernel counted; nil without --service-counters.
	Counters *Counters `json:"counters"`
	Ports    []struct {
		Backends []struct {
			Address netip.AddrPort `json:"address"`
			Local   bool           `json:"local"`
			Ready   bool           `json:"ready"`
		} `json:"backends"`
	} `json:"ports"`
}

// ProxyProbe is what a node's probes have found of a Service.
type ProxyProbe struct {
	Probe string `json:"probe"`
	Asked int    `json:"asked"`
	// Failing are the endpoints that do not answer.
	Failing []struct {
		Address netip.AddrPort `json:"address"`
		Error   string         `json:"error"`
		Used    bool           `json:"used"` // all the same, as fewer than half would be left
	} `json:"failing"`
}

// Counters are what a kernel counted of a Service.
type Counters struct {
	Connections   uint64               `json:"connections"`
	BytesReceived uint64               `json:"bytesReceived"`
	BytesSent     uint64               `json:"bytesSent"`
	Refused       map[lb.Reason]uint64 `json:"refused"`
}

// ProxyVIP says whether a node delivers a VIP.
type ProxyVIP struct {
	VIP          netip.Addr `json:"vip"`
	Programmed   bool       `json:"programmed"`
	Reason       lb.Reason  `json:"reason"`
	Message      string     `json:"message"`
	LocalReady   int        `json:"localReady"`
	LocalServing int        `json:"localServing"`
	Ready        int        `json:"ready"`
	Serving      int        `json:"serving"`
}

// findings returns what both programs have found on the node.
func (a Agent) findings() []lb.Finding {
	var all []lb.Finding
	if a.Said != nil {
		all = append(all, a.Said.Findings...)
	}
	if a.Delivers != nil {
		all = append(all, a.Delivers.Findings...)
	}
	return all
}

// asked reports whether a program of the node has answered.
func (a Agent) asked() bool { return a.Said != nil || a.Delivers != nil }

// vip returns what the speaker says of a VIP.
func (a Agent) vip(addr netip.Addr) (SpeakerVIP, bool) {
	if a.Said != nil {
		for _, v := range a.Said.VIPs {
			if v.VIP == addr {
				return v, true
			}
		}
	}
	return SpeakerVIP{}, false
}

// service returns what the proxy says of a Service.
func (a Agent) service(key lb.Key) (ProxyService, bool) {
	if a.Delivers != nil {
		for _, s := range a.Delivers.Services {
			if s.Service == key.String() {
				return s, true
			}
		}
	}
	return ProxyService{}, false
}
