package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// ServicesChain returns the chain of iptables-nft, in nftables' words, that is there in iptables mode.
func ServicesChain(family lb.Family) string { return nftFamily(family) + " nat " + chainServices }

const (
	// maxWalked is how many chains a walk reads, each with a command of its own, and maxWalkedRules how many
	// rules of one.
	maxWalked      = 512
	maxWalkedRules = 50_000
)

// KernelRules are rules in the kernel, of which each chain is read when a walk comes to it.
type KernelRules struct {
	// Variant names the program that shows the rules, such as iptables-nft.
	Variant string
	// Notes say what was taken for granted.
	Notes []string

	ctx    context.Context
	chains map[string][]string
}

var _ WalkedRules = (*KernelRules)(nil)

// Walkable returns the rules of iptables mode in the network namespace of the calling thread, nil if
// there are none. inNft is set if nftables has ServicesChain.
func Walkable(ctx context.Context, family lb.Family, inNft bool) (*KernelRules, error) {
	if !inNft {
		used, err := legacyTable(family, "nat") // to ask iptables-legacy would create it
		if err != nil || !used {
			return nil, err
		}
	}
	commands, err := programs(ctx, plan.ForwardChain{Family: nftFamily(family), Legacy: !inNft})
	if err != nil {
		return nil, err
	}
	k := &KernelRules{Variant: strings.TrimSuffix(commands.save, "-save"), ctx: ctx, chains: map[string][]string{}}
	services, err := k.Chain("nat", chainServices)
	if err != nil || services == nil {
		return nil, err
	}
	return k, nil
}

// Untouched returns the rules for another packet: they share what was read, and have no notes yet.
func (k *KernelRules) Untouched() *KernelRules {
	fresh := *k
	fresh.Notes = nil
	return &fresh
}

// Chain implements WalkedRules.
func (k *KernelRules) Chain(table, chain string) ([]string, error) {
	name := table + " " + chain
	if rules, ok := k.chains[name]; ok {
		return rules, nil
	}
	if len(k.chains) == maxWalked {
		return nil, fmt.Errorf("the walk reads no more than %d chains", maxWalked)
	}
	var rules []string
	err := Commands{}.run(k.ctx, "", func(out io.Reader) (err error) {
		rules, err = parseChain(out, chain)
		return err
	}, k.Variant, "-t", table, "-S", chain)
	if err != nil && strings.Contains(err.Error(), "No chain") {
		rules, err = nil, nil
	}
	if err == nil {
		k.chains[name] = rules
	}
	return rules, err
}

// parseChain reads what iptables -S prints of a chain.
func parseChain(out io.Reader, chain string) ([]string, error) {
	rules := []string{}
	scanner := bufio.NewScanner(out)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		if rule, ok := strings.CutPrefix(scanner.Text(), "-A "+chain+" "); ok {
			rules = append(rules, rule)
		}
		if len(rules) > maxWalkedRules {
			return nil, fmt.Errorf("chain %s has more than %d rules", chain, maxWalkedRules)
		}
	}
	return rules, scanner.Err()
}

// Recent implements WalkedRules. Whether a client's time is over cannot be told from outside.
func (k *KernelRules) Recent(list string, client netip.Addr) (float64, error) {
	if strings.Contains(list, "/") || strings.HasPrefix(list, ".") {
		return 0, fmt.Errorf("the list %s", list)
	}
	file, err := os.ReadFile(filepath.Join("/proc/thread-self/net/xt_recent", list))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	if !isListed(file, client) {
		return 0, nil
	}
	note := fmt.Sprintf("%s has a backend by session affinity, unless its time is over", client)
	if client.IsUnspecified() {
		note = fmt.Sprintf("the rules lead to the relay, unless the proxy has not renewed that for %s", plan.RelayLease)
	}
	if !slices.Contains(k.Notes, note) {
		k.Notes = append(k.Notes, note)
	}
	return 1, nil
}

// isListed reports whether the file of a list of the match recent has a client.
func isListed(file []byte, client netip.Addr) bool {
	for line := range bytes.Lines(file) {
		text, _, _ := strings.Cut(strings.TrimPrefix(string(line), "src="), " ")
		if addr, err := netip.ParseAddr(text); err == nil && addr == client {
			return true
		}
	}
	return false
}
