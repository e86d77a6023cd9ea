package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// stateRoot holds a folder per lab. Its owner holds a lock on the folder's file "lock" for as long
// as it lives; a folder whose lock is free is a leftover, unless it holds a file "kept".
const stateRoot = "/var/lib/landfall-lab"

// tokenVariable is in the environment of every process that a lab starts, with a value of its own.
// It is how a later run finds the processes of a lab whose owner was killed, and no others.
const tokenVariable = "LANDFALL_LAB"

var validName = regexp.MustCompile(`^[a-z][a-z0-9]{0,9}$`)

// state is a lab's place on the machine: its name, which prefixes its namespaces, and its folder.
type state struct {
	name string
	dir  string
	mark string // NAME=VALUE, in the environment of each process
	lock *os.File
}

// Info is what is known of a lab on this machine.
type Info struct {
	Name string
	// Kept is set for a lab that outlives the program that started it.
	Kept bool
	// Alive is set while the program that started it runs.
	Alive bool
}

// claimState takes a name and a folder for a new lab, after removing the leftovers of labs whose
// owner was killed. The empty name stands for the first free of lf1, lf2, …
func claimState(ctx context.Context, name string) (*state, error) {
	if name != "" && !validName.MatchString(name) {
		return nil, fmt.Errorf("name %q: want a letter, then up to 9 letters and digits, in lower case", name)
	}
	unlock, err := lockStates()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeLeftovers(ctx); err != nil {
		return nil, fmt.Errorf("remove leftovers of an earlier run: %w", err)
	}
	if name == "" {
		if name, err = freeName(); err != nil {
			return nil, err
		}
	}
	dir := filepath.Join(stateRoot, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lab %s is there already: %w", name, err)
	}
	s := &state{name: name, dir: dir, mark: tokenVariable + "=" + name + "-" + rand.Text()}
	s.lock, err = lockFile(filepath.Join(dir, "lock"))
	err = errors.Join(err,
		os.WriteFile(filepath.Join(dir, "mark"), []byte(s.mark), 0o600),
		os.WriteFile(filepath.Join(dir, "boot"), bootID(), 0o600))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return s, nil
}

// List returns the labs of this machine, leftovers included.
func List() ([]Info, error) {
	entries, err := os.ReadDir(stateRoot)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var infos []Info
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(stateRoot, e.Name())
		infos = append(infos, Info{Name: e.Name(), Kept: isKept(dir), Alive: isOwned(dir)})
	}
	return infos, nil
}

// Remove takes down a lab that no program owns: one that was kept, or a leftover.
func Remove(ctx context.Context, name string) error {
	unlock, err := lockStates()
	if err != nil {
		return err
	}
	defer unlock()
	dir := filepath.Join(stateRoot, name)
	if _, err := os.Stat(dir); err != nil || !validName.MatchString(name) {
		return fmt.Errorf("there is no lab %q", name)
	}
	if isOwned(dir) {
		return fmt.Errorf("lab %s belongs to a program that is still running: end that", name)
	}
	return removeState(ctx, name)
}

// remove takes the lab down: its processes, its namespaces, its folder.
func (s *state) remove(ctx context.Context) error {
	return errors.Join(removeState(ctx, s.name), s.lock.Close())
}

// keep lets the lab outlive this program.
func (s *state) keep() error {
	return errors.Join(os.WriteFile(filepath.Join(s.dir, "kept"), nil, 0o600), s.lock.Close())
}

// namespace names the network namespace of a host.
func (s *state) namespace(host string) string { return s.name + "-" + host }

// path returns a path in the lab's folder.
func (s *state) path(elem ...string) string {
	return filepath.Join(append([]string{s.dir}, elem...)...)
}

func freeName() (string, error) {
	for n := 1; ; n++ {
		name := "lf" + strconv.Itoa(n)
		spaces, err := namespacesWith(name + "-")
		if err != nil {
			return "", err
		}
		if _, err := os.Stat(filepath.Join(stateRoot, name)); errors.Is(err, os.ErrNotExist) && len(spaces) == 0 {
			return name, nil
		}
	}
}

func removeLeftovers(ctx context.Context) error {
	infos, err := List()
	if err != nil {
		return err
	}
	var errs []error
	for _, lab := range infos {
		if !lab.Alive && !lab.Kept {
			errs = append(errs, removeState(ctx, lab.Name))
		}
	}
	return errors.Join(errs...)
}

// removeState removes a lab's processes, its namespaces and its folder.
func removeState(ctx context.Context, name string) error {
	dir := filepath.Join(stateRoot, name)
	mark, markErr := os.ReadFile(filepath.Join(dir, "mark"))
	// A process that is just being started is not found, and may write into the folder later.
	for try := 1; ; try++ {
		if markErr == nil {
			if err := killMarked(ctx, string(mark)); err != nil {
				return err
			}
		}
		err := errors.Join(removeNamespaces(ctx, name+"-"), removeCgroups(dir), os.RemoveAll(dir))
		if !errors.Is(err, unix.ENOTEMPTY) || try == removeTries {
			return err
		}
		time.Sleep(100 * time.Millisecond)
		// Another program may have taken the rest for a leftover, removed it, and made a lab of that name.
		if now, err := os.ReadFile(filepath.Join(dir, "mark")); err == nil && !bytes.Equal(now, mark) {
			return nil
		}
	}
}

// removeTries is how often a lab is removed that still writes into its folder.
const removeTries = 10

func removeNamespaces(ctx context.Context, prefix string) error {
	spaces, err := namespacesWith(prefix)
	errs := []error{err}
	for _, ns := range spaces {
		if out, err := exec.CommandContext(ctx, "ip", "netns", "delete", ns).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("ip netns delete %s: %w: %s", ns, err, bytes.TrimSpace(out)))
		}
	}
	return errors.Join(errs...)
}

// killMarked kills the processes that carry mark in their environment and waits until they are
// gone.
func killMarked(ctx context.Context, mark string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	killed := map[int]bool{}
	for {
		pids, err := markedProcesses(mark)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			killed[pid] = true
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		// A process that dies loses its environment first, while threads of it may still write files.
		maps.DeleteFunc(killed, func(pid int, _ bool) bool { return hasEnded(pid) })
		if len(pids) == 0 && len(killed) == 0 {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("processes %v do not end: %w", slices.Sorted(maps.Keys(killed)), ctx.Err())
		}
	}
}

// hasEnded reports whether nothing of a process runs any more: it is gone, or only waits for its
// parent.
func hasEnded(pid int) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	threads, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return true
	}
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	// pid (name) state …, and the name may hold anything.
	state := stat[bytes.LastIndexByte(stat, ')')+1:]
	return err != nil || len(threads) <= 1 && bytes.HasPrefix(bytes.TrimSpace(state), []byte("Z"))
}

func markedProcesses(mark string) ([]int, error) {
	if len(mark) < len(tokenVariable)+8 {
		return nil, fmt.Errorf("mark %q is damaged", mark)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		environ, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && slices.Contains(strings.Split(string(environ), "\x00"), mark) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// isKept reports whether the lab was to outlive its owner; a restart of the machine ends that.
func isKept(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "kept"))
	boot, _ := os.ReadFile(filepath.Join(dir, "boot"))
	return err == nil && bytes.Equal(boot, bootID())
}

func isOwned(dir string) bool {
	f, err := lockFile(filepath.Join(dir, "lock"))
	if err == nil {
		f.Close()
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}

func bootID() []byte {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return id
}

// lockStates serialises what adds and removes labs.
func lockStates() (unlock func(), err error) {
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(stateRoot, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, cmp.Or(f.Close(), fmt.Errorf("lock %s: %w", f.Name(), err))
	}
	return func() { f.Close() }, nil
}

// lockFile locks path, or fails with EWOULDBLOCK if somebody else has.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
