package iptables

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Cleanup removes our chains, and the jumps to them, of both families, from each variant of
// iptables that is installed. It touches nothing else, and does nothing where iptables is not
// installed. Before the rules go it calls unsetLocalnet if Landfall has set the kernel parameter
// route_localnet and nobody else needs it.
func Cleanup(ctx context.Context, unsetLocalnet func()) error {
	var errs []error
	for _, name := range []string{"iptables", "ip6tables"} {
		found := false
		for _, variant := range []string{"-nft", "-legacy", ""} {
			c := Commands{save: name + variant + "-save", restore: name + variant + "-restore"}
			if _, err := exec.LookPath(c.save); err != nil || variant == "" && found {
				continue
			}
			found = true
			if err := cleanup(ctx, c, unsetLocalnet); err != nil {
				errs = append(errs, fmt.Errorf("%s%s: %w", name, variant, err))
			}
		}
	}
	return errors.Join(errs...)
}

// cleanup removes what is ours from one variant.
func cleanup(ctx context.Context, kernel Kernel, unsetLocalnet func()) error {
	have, err := readSave(ctx, kernel)
	if err != nil {
		return err
	}
	if set, needed := have.setLocalnet(); set && !needed {
		unsetLocalnet()
	}
	// Packets whose destination is translated already must still meet the rules that masquerade.
	if input := detach(have.nat); input != "" {
		if err := kernel.Restore(ctx, input); err != nil {
			return err
		}
		nfnetlink.WaitForPackets()
	}
	input, _ := removal(have)
	if input == "" {
		return nil
	}
	return kernel.Restore(ctx, input)
}

// detach returns the input for iptables-restore that removes the jumps to the choice of a backend,
// and notes in nat that they are gone.
func detach(nat chains) string {
	var input strings.Builder
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		if rules, ok := nat[chain]; ok {
			nat[chain] = writeHooks(&input, chain, rules, nil)
		}
	}
	if input.Len() == 0 {
		return ""
	}
	return "*nat\n" + input.String() + "COMMIT\n"
}

// removal returns the input for iptables-restore that removes what is ours, and what is there then.
func removal(have tables) (string, tables) {
	none := func(have chains) chains { // no jumps in any built-in chain
		hooks := chains{}
		for chain := range have {
			if !strings.HasPrefix(chain, prefix) {
				hooks[chain] = nil
			}
		}
		return hooks
	}
	return script(have, tables{}, tables{nat: none(have.nat), filter: none(have.filter)}, leftovers{})
}
