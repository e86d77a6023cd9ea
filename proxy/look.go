package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/conntrack"
)

// lookTime bounds how long a look into the kernel takes.
const lookTime = 20 * time.Second

// lookUsage is what --help says of the looks.
const lookUsage = `Arguments that print something as JSON and exit, beside a running proxy:
  trace --from IP[:PORT] --to IP[:PORT] [--protocol TCP|UDP|SCTP|ICMP] [--in-interface NAME]
      what the rules in the kernel do with a packet
  flows --to [IP][:PORT][/PROTOCOL] [--to ...] [--limit N]
      connections of conntrack; without an address PORT is a node port
  reach [--connect IP:PORT ...] [--from IP ... --to IP:PORT[/PROTOCOL] ...]
      whether TCP connections from this node are accepted there, with nothing sent over them; and which
      packets rules of other programs drop
  status
      what the running proxy does`

// look runs one of the arguments that print what is in the kernel, or what a connection meets. They ask neither
// the proxy nor the API server. known is false for other arguments.
func look(args []string, stdout io.Writer) (known bool, err error) {
	if len(args) == 0 {
		return false, nil
	}
	run := map[string]func(context.Context, []string) (any, error){"trace": lookTrace, "flows": lookFlows,
		"reach": lookReach}[args[0]]
	if run == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), lookTime, fmt.Errorf("no answer within %s", lookTime))
	defer cancel()
	result, err := run(ctx, args[1:])
	if errors.Is(err, pflag.ErrHelp) {
		_, err = fmt.Fprintln(stdout, lookUsage)
		return true, err
	} else if err != nil {
		return true, fmt.Errorf("%s: %w", args[0], err)
	}
	return true, json.NewEncoder(stdout).Encode(result)
}

// lookFlagSet returns flags that print nothing by themselves.
func lookFlagSet(name string) *pflag.FlagSet {
	set := pflag.NewFlagSet(name, pflag.ContinueOnError)
	set.SetOutput(io.Discard)
	set.Usage = func() {}
	return set
}

func parseLook(set *pflag.FlagSet, args []string) error {
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return ops.Usagef("unknown argument %q", set.Arg(0))
	}
	return nil
}

func lookTrace(ctx context.Context, args []string) (any, error) {
	set := lookFlagSet("trace")
	from, to := set.String("from", "", ""), set.String("to", "", "")
	protocol, in := set.String("protocol", string(lb.TCP), ""), set.String("in-interface", "", "")
	if err := parseLook(set, args); err != nil {
		return nil, err
	}
	p := lb.TracePacket{Protocol: lb.Protocol(strings.ToUpper(*protocol)), Interface: *in}
	var err error
	if p.Source, err = lb.ParseEnd(*from); err != nil {
		return nil, ops.Usagef("--from: %w", err)
	}
	if p.Destination, err = lb.ParseEnd(*to); err != nil {
		return nil, ops.Usagef("--to: %w", err)
	}
	if err := p.Check(); err != nil {
		return nil, ops.Usagef("%w", err)
	}
	return traceKernel(ctx, nodeName(), p, *in != "")
}

func nodeName() string {
	host, _ := os.Hostname()
	return cmp.Or(os.Getenv("NODE_NAME"), host)
}

// maxFlows bounds how many flows are printed.
const maxFlows = 10_000

func lookFlows(_ context.Context, args []string) (any, error) {
	set := lookFlagSet("flows")
	to, limit := set.StringArray("to", nil, ""), set.Int("limit", 100, "")
	if err := parseLook(set, args); err != nil {
		return nil, err
	}
	if len(*to) == 0 || *limit < 0 || *limit > maxFlows {
		return nil, ops.Usagef("flows needs --to, and --limit from 0 to %d", maxFlows)
	}
	var targets []lb.FlowTarget
	for _, text := range *to {
		target, err := lb.ParseFlowTarget(text)
		if err != nil {
			return nil, ops.Usagef("--to: %w", err)
		}
		targets = append(targets, target)
	}
	table, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	defer table.Close()
	return listFlows(table, targets, *limit)
}

func listFlows(table conntrack.Netlink, targets []lb.FlowTarget, limit int) (lb.Flows, error) {
	local := map[netip.Addr]bool{} // only addresses that have the port of a node port are asked about
	flows, err := table.List(targets, limit, func(addr netip.Addr) bool {
		is, known := local[addr]
		if !known {
			path, found, err := links.PathTo(addr)
			is = err == nil && found && path.Local
			local[addr] = is
		}
		return is
	})
	flows.Node = nodeName()
	return flows, err
}
