package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/notes"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/vrf"
)

// The modes.
const (
	modeAuto     = "auto"
	modeIptables = "iptables"
	modeNftables = "nftables"
)

// How often the proxy compares the kernel's rules with its own, without a sign of a change.
const (
	verifyIptables = 15 * time.Second
	verifyLegacy   = 1500 * time.Millisecond // the kernel reports no changes; large rulesets are read less often
	verifyNftables = 5 * time.Minute
)

// batchIptables is how many Services iptables-nft writes at once. The legacy variant replaces whole
// tables in any case.
const batchIptables = 500

// kernel is the way to this node's rules, in the mode that was chosen.
type kernel struct {
	mode     string
	families []lb.Family
	unusable map[lb.Family]error // why the node lacks the other families
	commands map[lb.Family]iptables.Kernel
	watcher  *iptables.Watcher // nil where the kernel reports no changes
	batch    int               // Services that are written at once; 0 for all
	verify   time.Duration
	netlink  *nftables.Netlink
}

// open finds out what this node's kernel can do. One family is enough. Left to itself it takes
// nftables, where a change costs what it changes however many Services there are, and iptables
// where these serve a family that nftables cannot.
func open(ctx context.Context, mode string, log *slog.Logger) (kernel, error) {
	var k kernel
	var err error
	why := "as --mode says"
	switch mode {
	case modeNftables:
		k, err = openNftables(mode, log)
	case modeIptables:
		k, err = openIptables(ctx, log)
	default:
		k, why, err = choose(func() (kernel, error) { return openNftables(mode, log) },
			func() (kernel, error) { return openIptables(ctx, log) })
	}
	if err != nil {
		return k, fmt.Errorf("--mode=%s: %w", mode, err)
	}
	log.Info("chose the mode", "mode", k.mode, "why", why)
	k.report(log)
	return k, nil
}

// choose takes nftables unless iptables serve more families, and says why.
func choose(openNftables, openIptables func() (kernel, error)) (k kernel, why string, err error) {
	k, err = openNftables()
	if err == nil && len(k.families) == len(allFamilies) {
		return k, "the kernel supports the nftables rules for both families", nil
	}
	short := cmp.Or(err, errors.Join(k.unusable[lb.IPv4], k.unusable[lb.IPv6]))
	other, otherErr := openIptables()
	switch {
	case otherErr == nil && (err != nil || len(other.families) > len(k.families)):
		k.close()
		return other, fmt.Sprintf("nftables is not usable: %v", short), nil
	case err != nil:
		return k, "", errors.Join(fmt.Errorf("nftables: %w", err), fmt.Errorf("iptables: %w", otherErr))
	case otherErr == nil:
		other.close()
	}
	return k, "iptables serves no more families", nil
}

func (k kernel) report(log *slog.Logger) {
	for family, err := range k.unusable {
		log.Warn("cannot serve an address family", "family", family, "error", err)
	}
}

func openIptables(ctx context.Context, log *slog.Logger) (kernel, error) {
	k := kernel{mode: modeIptables, unusable: map[lb.Family]error{}, commands: map[lb.Family]iptables.Kernel{},
		verify: verifyLegacy}
	watcher, err := iptables.NewWatcher()
	if err != nil {
		log.Info("cannot watch for changes to the rules; reading them regularly instead", "reason", err)
	}
	for _, family := range allFamilies {
		commands, err := iptables.Detect(ctx, family)
		if err != nil {
			k.unusable[family] = fmt.Errorf("this node cannot serve %s: %w", family, err)
			continue
		}
		log.Info("found iptables", "family", family, "with", commands)
		if !commands.Legacy(ctx) {
			k.batch = batchIptables
			if watcher != nil {
				k.watcher, k.verify = watcher, verifyIptables
				commands = commands.Watched(watcher)
			}
		}
		k.commands[family] = commands
		k.families = append(k.families, family)
	}
	if watcher != nil && k.watcher == nil {
		watcher.Close()
	}
	if len(k.families) == 0 {
		return k, errors.Join(k.unusable[lb.IPv4], k.unusable[lb.IPv6])
	}
	return k, nil
}

func openNftables(mode string, log *slog.Logger) (kernel, error) {
	k := kernel{mode: modeNftables, unusable: map[lb.Family]error{}, verify: verifyNftables}
	if release := release(); mode == modeAuto && lb.BeforeNftables(release) {
		return k, fmt.Errorf("the kernel, Linux %s, is older than %s", release, lb.NftablesSince)
	}
	way, err := nftables.Dial()
	if err != nil {
		return k, err
	}
	for _, family := range allFamilies {
		err := try(log, "the nftables rules", family, func() error { return nftables.Probe(way, family) })
		if err != nil {
			k.unusable[family] = err
			continue
		}
		k.families = append(k.families, family)
	}
	if len(k.families) == 0 {
		way.Close()
		return k, errors.Join(k.unusable[lb.IPv4], k.unusable[lb.IPv6])
	}
	k.netlink = way
	return k, nil
}

const (
	// patience is how long a trial transaction may take until the log says that the proxy waits for it.
	patience = 5 * time.Second
	// trials is how often one is made at most, and trialAgain is how long after one that failed.
	trials, trialAgain = 5, time.Second
)

// shortages are the errors of a node that lacks something for a moment. They do not say what its kernel supports.
var shortages = []unix.Errno{unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.EBUSY, unix.EMFILE, unix.ENFILE}

func isShortage(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && slices.Contains(shortages, errno)
}

// try makes a trial transaction, which cannot be interrupted: for each missing module, the kernel starts modprobe,
// waits for it, and begins the transaction anew. If that takes long, the log says what the proxy waits for, and then
// how long it took. The result holds for as long as the proxy runs, so a transaction that failed for a shortage is
// repeated.
func try(log *slog.Logger, what string, family lb.Family, transaction func() error) error {
	log = log.With("family", family)
	started := time.Now()
	notice := time.AfterFunc(patience, func() {
		log.Warn("still waiting for the kernel to try " + what + "; it may be loading modules")
	})
	err := transaction()
	for n := 1; n < trials && isShortage(err); n++ {
		log.Warn("trying "+what+" again", "error", err)
		time.Sleep(trialAgain)
		err = transaction()
	}
	if !notice.Stop() {
		log.Info("the kernel has tried "+what, "after", time.Since(started).Round(time.Millisecond))
	}
	return err
}

func (k kernel) close() {
	if k.netlink != nil {
		k.netlink.Close()
	}
	if k.watcher != nil {
		k.watcher.Close()
	}
}

// release returns what uname -r prints.
func release() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return ""
	}
	return unix.ByteSliceToString(name.Release[:])
}

// needs returns what counts what a Service needs, how much of that one may need in a family, and what it is.
func (k kernel) needs() (count func(plan.Service) int, most int, unit string) {
	switch {
	case k.mode == modeNftables:
		return nftables.Needs, nftables.MaxElements, ""
	case k.batch == 0:
		return iptables.Needs, iptables.MaxLegacyRules, "rules"
	}
	return iptables.Needs, iptables.MaxServiceRules, "rules"
}

// writer returns the actor that writes rules.
func (k kernel) writer(log *slog.Logger, changed func(), m *metrics) *dialect.Actor {
	deps := dialect.Deps{Log: log.With("mode", k.mode), Unusable: k.unusable, Verify: k.verify, Changed: changed}
	if k.mode == modeIptables {
		deps.Rules, deps.Observe = iptables.Rules(k.commands, k.batch), m.iptables
		if k.watcher != nil {
			deps.Watch = k.watcher.Watch
		}
	} else {
		deps.Rules, deps.Observe = nftables.Rules(k.netlink, k.unusable), m.nftables
		deps.Watch = nftables.Watch(k.netlink, log)
	}
	return dialect.New(deps)
}

// leaveOther removes what a predecessor wrote in the mode that is not ours, once ours serves. It is
// not worth ending for.
func (k kernel) leaveOther(ctx context.Context, log *slog.Logger, parameters kernelParameters) {
	var err error
	if k.mode == modeNftables {
		err = iptables.Cleanup(ctx, parameters.unsetLocalnet)
	} else {
		err = cleanupNftables()
	}
	if err != nil {
		log.Warn("cannot remove the rules of another mode", "error", err)
	}
}

func cleanupNftables() error {
	way, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer way.Close()
	return errors.Join(cutFlowsOfRelay(way), nftables.Cleanup(way))
}

// cleanup removes all that is ours, whichever mode wrote it, and nothing else.
func cleanup(ctx context.Context, parameters kernelParameters) error {
	var errs []error
	if err := iptables.Cleanup(ctx, parameters.unsetLocalnet); err != nil {
		errs = append(errs, fmt.Errorf("iptables: %w", err))
	}
	if err := iptables.CleanupForward(ctx); err != nil {
		errs = append(errs, fmt.Errorf("iptables: %w", err))
	}
	if err := cleanupNftables(); err != nil {
		errs = append(errs, fmt.Errorf("nftables: %w", err))
	}
	if err := counters.Cleanup(); err != nil {
		errs = append(errs, fmt.Errorf("counters: %w", err))
	}
	if err := vrf.Cleanup(); err != nil {
		errs = append(errs, fmt.Errorf("VRFs: %w", err))
	}
	if err := cleanupRescue(parameters); err != nil {
		errs = append(errs, fmt.Errorf("rescue: %w", err))
	}
	for _, p := range []notes.Parameter{reusing, liberal} {
		if err := parameters.restore(p, nil); err != nil {
			errs = append(errs, fmt.Errorf("kernel parameters: %w", err))
		}
	}
	return errors.Join(errs...)
}
