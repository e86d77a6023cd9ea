package ops

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// Names that --metrics-bind-address takes for addresses.
const (
	hostLocal = "localhost"
	hostNode  = "node"
)

// nodeAddress names the variable that says which address of the node Kubernetes knows.
const nodeAddress = "NODE_IP"

// bindAddresses returns the addresses that --metrics-bind-address names. It returns none for ""
// and "0".
func bindAddresses(list string, env environment) ([]string, error) {
	if list == "" || list == "0" {
		return nil, nil
	}
	var all []string
	for item := range strings.SplitSeq(list, ",") {
		address, err := bindAddress(strings.TrimSpace(item), env)
		if err != nil {
			return nil, err
		}
		all = append(all, address)
	}
	return all, nil
}

func bindAddress(item string, env environment) (string, error) {
	host, port, err := net.SplitHostPort(item)
	if err != nil {
		return "", Usagef("--metrics-bind-address: %q is not address:port, such as :7480, localhost:7480 or node:7480", item)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", Usagef("--metrics-bind-address: %q: %q is not a port", item, port)
	}
	switch host {
	case "":
	case hostLocal:
		host = "127.0.0.1"
	case hostNode:
		value, _ := env(nodeAddress)
		if net.ParseIP(value) == nil {
			return "", Usagef("--metrics-bind-address: %q needs the node's IP address in the environment variable %s, which "+
				"is %q", item, nodeAddress, value)
		}
		host = value
	default:
		if net.ParseIP(host) == nil {
			return "", Usagef("--metrics-bind-address: %q: %q is neither an IP address nor localhost nor node", item, host)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// openAll opens the sockets before the work begins, so that an address in use ends the program
// before it has changed anything.
func openAll(addresses []string) ([]net.Listener, error) {
	var all []net.Listener
	for _, address := range addresses {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			for _, opened := range all {
				opened.Close()
			}
			return nil, fmt.Errorf("--metrics-bind-address: %w", err)
		}
		all = append(all, listener)
	}
	return all, nil
}

// openLater opens the sockets once another process has closed them; none if ctx ends before.
func openLater(ctx context.Context, log *slog.Logger, addresses []string) []net.Listener {
	failures := loop.Failures{Repeat: time.Hour}
	for {
		listeners, err := openAll(addresses)
		failures.Log(log, "cannot serve metrics yet; trying again", "serving metrics", err)
		if err == nil {
			return listeners
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(openEvery):
		}
	}
}

// openEvery is how often it tries.
const openEvery = 500 * time.Millisecond
