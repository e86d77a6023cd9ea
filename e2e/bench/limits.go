package main

import "strings"

// bound is what a figure is to be compared with.
type bound struct {
	// limit is how much it may be at most, or the name of the figure beside which it is to be read.
	limit string
	// by is what keeps it from being less, whoever writes the program.
	by string
}

const (
	findsCrash    = "BFD between speakers finds a crash after 3 x 50 ms"
	likeLandfalls = "what bounds that one, kube-proxy and MetalLB's controller"
	inPart        = "the kernel's own time for the rules, where it gets them; the processor else"
	fromMemory    = "the API server's lists, which are in memory here"
	noIO          = "the processor: it waits for no kernel and no network"
)

// labBounds are those of the benchmarks of the lab, by the beginning of their names: the longest that fits counts.
var labBounds = map[string]bound{
	"BGPCrash": {"200 ms until the last new connection is lost",
		"BFD with the routers finds a crash after 3 x 50 ms"},
	"BGPServices":        {"beside MetalLB/bgp", "the API server, which takes s-creating"},
	"Crash":              {"p50 200 ms, p99 300 ms", findsCrash},
	"CrashWithEndpoints": {"p50 200 ms, p99 300 ms; none failed later", findsCrash},
	"DirectRacksAtRest":  {"beside masqueraded", "the questions to nodes in other racks"},
	"DirectRacksCut":     {"550 ms", "three questions without an answer: 0.3 to 0.55 s"},
	"Drain":              {"none lost; beside MetalLB/drain", "packets on their way to a node when it is drained"},
	"Explain":            {"300 ms", "the API server's lists, and one look at each node that is asked"},
	"FalseAlarms":        {"none", "when the kernel runs a speaker beside busy loops"},
	"FiveHundredServices": {"last answer 0.5 s; speaker and proxy 1 s",
		"the figures called floor: programs that only watch"},
	"ManyAddresses":      {"1 s until all are announced", findsCrash + ", then one announcement for each address"},
	"MetalLB/500":        {"beside FiveHundredServices", likeLandfalls},
	"MetalLB/bgp":        {"beside BGPServices", likeLandfalls},
	"MetalLB/crash":      {"beside Crash", "its gossip, which suspects a node for seconds before it takes it for gone"},
	"MetalLB/drain":      {"beside Drain", "kube-proxy, which knows nothing of connections of other nodes"},
	"MetalLB/new":        {"beside NewService", likeLandfalls},
	"NewService":         {"p50 60 ms", "the API server's call, and the client's question each 4 ms"},
	"NewService/ahead=0": {"beside ahead=16", "a probe for another holder takes 600 ms"},
	"PathLost": {"50 ms until the withdrawal",
		"the command that makes the fault; Linux tells of a link 20 ms before it takes its routes"},
	"PathLostL2": {"50 ms", "the command that makes the fault, and one announcement"},
	"ProbeEject": {"300 ms", "two questions, 100 ms apart, that get no answer"},
	"Racks": {"0 % lost, but for a crash; beside port-0, without the tunnel",
		"nothing: every node knows where a connection belongs"},
	"WarmUp": {"500 ms", "the API server's lists, and the first rules in the kernel"},
}

// goBounds are what bounds the Go benchmarks of a package. Their limit is what they took before.
var goBounds = map[string]string{
	"controller/dashboard": fromMemory,
	"controller/plan":      noIO,
	"controller/view":      noIO,
	"ctl":                  fromMemory,
	"internal/kube":        noIO,
	"internal/lb":          noIO,
	"internal/otlp":        noIO,
	"proxy":                inPart,
	"proxy/across":         "a packet there and back through the kernel",
	"proxy/conntrack":      "the kernel's table, where it is read; the processor else",
	"proxy/counters":       "the kernel's listing of its counters",
	"proxy/iptables":       "iptables-restore, which writes whole tables",
	"proxy/nftables":       inPart,
	"proxy/path":           noIO,
	"proxy/plan":           noIO,
	"proxy/probe":          "two questions, 100 ms apart, that get no answer",
	"proxy/relay":          noIO,
	"proxy/relayfeed":      noIO,
	"proxy/rescue":         inPart,
	"speaker":              noIO,
	"speaker/ahead":        noIO,
	"speaker/bfd":          "when the kernel runs the process, and its sockets",
	"speaker/bgp":          "gobgp at the other end of a socket",
	"speaker/holders":      noIO,
	"speaker/l2":           noIO,
	"speaker/members":      "memberlist, over a network in memory",
	"speaker/plan":         noIO,
}

// bound returns what a benchmark's figures are to be compared with.
func (b benchmark) bound() bound {
	if b.Package != labPackage {
		return bound{"what it was", goBounds[b.Package]}
	}
	longest, found := "", bound{}
	for name, candidate := range labBounds {
		if len(name) > len(longest) && strings.HasPrefix(b.Name+"/", name+"/") {
			longest, found = name, candidate
		}
	}
	return found
}
