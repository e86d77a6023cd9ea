package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// kernelParameters are the files below /proc/sys/net. A container sees those read-only, unless it
// has the host's mounted elsewhere.
type kernelParameters struct {
	folder string
	log    *slog.Logger
}

// What kube-proxy makes of conntrack's limits: room for every connection of a node, and no flow
// kept for days after its ends are gone.
const (
	conntrackPerCore = 32 * 1024
	conntrackMost    = 1 << 20
	conntrackLeast   = 128 * 1024
	establishedLimit = 24 * 60 * 60 // seconds
	closeWaitLimit   = 60 * 60      // seconds

	conntrackFolder  = "netfilter"
	parameterMax     = conntrackFolder + "/nf_conntrack_max"
	parameterCount   = conntrackFolder + "/nf_conntrack_count"
	parameterBuckets = conntrackFolder + "/nf_conntrack_buckets"
	parameterTimeout = conntrackFolder + "/nf_conntrack_tcp_timeout_established"
	parameterWait    = conntrackFolder + "/nf_conntrack_tcp_timeout_close_wait"
	parameterLiberal = conntrackFolder + "/nf_conntrack_tcp_be_liberal"

	interfaceFolder   = "ipv4/conf"
	routeLocalnet     = interfaceFolder + "/all/route_localnet"
	parameterRedirect = "send_redirects"
)

// set writes a parameter that is wrong now. What cannot be written stays as it is, and the log says
// so: a container may see it read-only, and the node's administrator has set it.
func (k kernelParameters) set(name string, value int, wrong func(now int) bool) bool {
	err := write(filepath.Join(k.folder, name), value, wrong)
	if err != nil {
		k.log.Info("cannot set a kernel parameter", "parameter", "net/"+name, "wanted", value, "reason", err)
	}
	return err == nil
}

// on reports whether a parameter is there and 1.
func (k kernelParameters) on(name string) bool {
	text, err := os.ReadFile(filepath.Join(k.folder, name))
	return err == nil && strings.TrimSpace(string(text)) == "1"
}

// number returns the value of a parameter; 0 if it is not there.
func (k kernelParameters) number(name string) int {
	text, err := os.ReadFile(filepath.Join(k.folder, name))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

func (k kernelParameters) switchOn(name string) bool {
	return k.set(name, 1, func(now int) bool { return now != 1 })
}

func (k kernelParameters) switchOff(name string) bool {
	return k.set(name, 0, func(now int) bool { return now != 0 })
}

// unsetLocalnet switches off again what Landfall has switched on for node ports at 127.0.0.1.
func (k kernelParameters) unsetLocalnet() {
	if k.switchOff(routeLocalnet) {
		k.log.Info("set a kernel parameter back", "parameter", "net/"+routeLocalnet, "value", 0)
	}
}

// localnetMemory remembers whether Landfall has set route_localnet: see iptables.Localnet.
type localnetMemory interface {
	Set(context.Context) (set, needed bool, err error)
	Mark(context.Context) error
}

// prepareLocalnet switches on what node ports at 127.0.0.1 need, and notes that first. Without such
// node ports it switches off what a predecessor has switched on.
func (s *settings) prepareLocalnet(ctx context.Context, parameters kernelParameters, memory localnetMemory) {
	if parameters.on(routeLocalnet) {
		set, needed, err := memory.Set(ctx)
		switch {
		case err != nil:
			parameters.log.Warn("cannot find out who has set a kernel parameter", "parameter", "net/"+routeLocalnet, "error",
				err)
		case set && !needed && !s.loopbackNodePorts:
			parameters.unsetLocalnet()
		default:
			s.setRouteLocalnet = set
		}
		return
	}
	if !s.loopbackNodePorts {
		return
	}
	if err := memory.Mark(ctx); err != nil {
		parameters.log.Warn("cannot note that a kernel parameter is Landfall's", "parameter", "net/"+routeLocalnet, "error",
			err)
	}
	if !parameters.switchOn(routeLocalnet) {
		s.loopbackNodePorts = false
		parameters.log.Warn("node ports are not reachable at 127.0.0.1")
		return
	}
	s.setRouteLocalnet = true // with the rules comes the note, also one that failed just now or that others flush
}

// conntrack writes conntrack's parameters.
func (k kernelParameters) conntrack(cores int, liberal bool) {
	most := max(min(conntrackPerCore*cores, conntrackMost), conntrackLeast)
	limit := func(seconds int) func(int) bool { return func(now int) bool { return now > seconds } }
	// The table is the whole machine's, so whoever may not set the limit keeps away from it too.
	if k.set(parameterMax, most, func(now int) bool { return now < most }) {
		k.set(parameterBuckets, most/4, func(now int) bool { return now < most/4 })
	}
	k.set(parameterTimeout, establishedLimit, limit(establishedLimit))
	k.set(parameterWait, closeWaitLimit, func(now int) bool { return now != closeWaitLimit })
	if liberal {
		k.switchOn(parameterLiberal)
	}
}

// redirecting returns the interfaces on which Linux sends ICMP redirects. Where a client has a VIP
// on its own subnet and so comes in and would go out at one interface, it gets one ahead of a
// refusal; the first refusals of UDP are lost on it then.
func (k kernelParameters) redirecting() []string {
	all := k.on(interfaceFolder + "/all/" + parameterRedirect)
	entries, err := os.ReadDir(filepath.Join(k.folder, interfaceFolder))
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		switch name := e.Name(); {
		case name == "all" || name == "default" || name == "lo":
		case all || k.on(filepath.Join(interfaceFolder, name, parameterRedirect)):
			names = append(names, name)
		}
	}
	return names
}

// write sets a parameter that is wrong now.
func write(file string, value int, wrong func(now int) bool) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	now, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if !wrong(now) {
		return nil
	}
	return os.WriteFile(file, []byte(strconv.Itoa(value)+"\n"), 0o644)
}

func cores() int { return cmp.Or(runtime.NumCPU(), 1) }
