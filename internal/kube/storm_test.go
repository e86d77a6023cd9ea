package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/internal/lb"
)

// stormAPI is an API server in memory, in the time of testing/synctest, without objects, that counts what
// it is asked.
type stormAPI struct {
	mu      sync.Mutex
	began   time.Time
	version int
	oldest  int           // watches from before it have to list again
	down    chan struct{} // closed while nothing listens
	gone    error         // of connections, while packets get no answer
	end     chan struct{} // closed when all watches end
	lists   []time.Duration
	// watching counts the watches that have gone on from a version.
	watching int
	refused  int // connections, two in each attempt: of a streamed list, and of a whole one
}

func newStormAPI() *stormAPI {
	return &stormAPI{began: time.Now(), version: 1, oldest: 1, end: make(chan struct{})}
}

// stop ends all watches and refuses connections until start.
func (a *stormAPI) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = make(chan struct{})
	close(a.end)
}

// start serves again, without what was before: as after a restart, the cache has no past.
func (a *stormAPI) start() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down, a.end = nil, make(chan struct{})
	a.version++
	a.oldest = a.version
}

// cut has nothing come from the API server, until mend: attempts to connect end with an error.
func (a *stormAPI) cut(gone error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gone = gone
	close(a.end)
	a.end = make(chan struct{})
}

func (a *stormAPI) mend() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gone = nil
}

func (a *stormAPI) isGone() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone
}

// reset begins to count anew.
func (a *stormAPI) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.began, a.lists, a.refused, a.watching = time.Now(), nil, 0, 0
}

// RoundTrip answers a request.
func (a *stormAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	time.Sleep(time.Millisecond)
	if err := a.isGone(); err != nil {
		time.Sleep(lostAfter / 2) // about as long as the kernel asks for the address by ARP
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down != nil {
		a.refused++
		return nil, syscall.ECONNREFUSED
	}
	query := r.URL.Query()
	from, _ := strconv.Atoi(query.Get("resourceVersion"))
	list := fmt.Appendf(nil, `{"metadata":{"resourceVersion":"%d"},"items":[]}`, a.version)
	switch {
	case query.Get("sendInitialEvents") != "":
		a.lists = append(a.lists, time.Since(a.began))
		return a.answer(r, http.StatusOK, a.bookmark(r), true), nil
	case query.Get("watch") != "" && from < a.oldest:
		status := metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old resource version"}
		raw, err := json.Marshal(metav1.WatchEvent{Type: "ERROR", Object: rawOf(status)})
		return a.answer(r, http.StatusOK, raw, true), err
	case query.Get("watch") != "":
		a.watching++
		return a.answer(r, http.StatusOK, nil, true), nil
	}
	a.lists = append(a.lists, time.Since(a.began))
	return a.answer(r, http.StatusOK, list, false), nil
}

// bookmark ends the first events of a streamed list.
func (a *stormAPI) bookmark(r *http.Request) []byte {
	kinds := map[string][2]string{"services": {"v1", "Service"}, "nodes": {"v1", "Node"}, "configmaps": {"v1", "ConfigMap"},
		"endpointslices": {"discovery.k8s.io/v1", "EndpointSlice"}, "daemonsets": {"apps/v1", "DaemonSet"},
		"servicecidrs":   {"networking.k8s.io/v1", "ServiceCIDR"},
		"ipaddresspools": {"landfall.dev/v1beta1", "IPAddressPool"}, "bfdprofiles": {"landfall.dev/v1beta1", "BFDProfile"},
		"l2advertisements": {"landfall.dev/v1beta1", "L2Advertisement"}, "bgppeers": {"landfall.dev/v1beta1", "BGPPeer"},
		"bgpadvertisements": {"landfall.dev/v1beta1", "BGPAdvertisement"},
		"communities":       {"landfall.dev/v1beta1", "Community"}}
	kind := kinds[path.Base(r.URL.Path)]
	return fmt.Appendf(nil, `{"type":"BOOKMARK","object":{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"%d",`+
		`"annotations":{%q:"true"}}}}`, kind[0], kind[1], a.version, metav1.InitialEventsAnnotationKey)
}

func rawOf(status metav1.Status) (raw runtime.RawExtension) {
	raw.Raw, _ = json.Marshal(status)
	return raw
}

// answer returns a body that ends at once or, open, with the watches.
func (a *stormAPI) answer(r *http.Request, code int, body []byte, open bool) *http.Response {
	b := &stormBody{Reader: bytes.NewReader(body), closed: make(chan struct{})}
	if open {
		b.end = a.end
	}
	return &http.Response{StatusCode: code, Request: r, Body: b, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}}
}

type stormBody struct {
	*bytes.Reader
	end    chan struct{} // nil: with the bytes
	closed chan struct{}
	once   sync.Once
}

func (b *stormBody) Read(p []byte) (int, error) {
	if b.Len() > 0 {
		return b.Reader.Read(p)
	}
	if b.end != nil {
		select {
		case <-b.end:
		case <-b.closed:
		}
	}
	return 0, io.EOF
}

func (b *stormBody) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

// registered are the watches of a node's speaker and proxy with the chart's defaults, by the function that registers
// each. For each Secret with passwords of BGP sessions a speaker has one more.
var registered = func() [2]map[string]func(*Client) {
	name, key, none := func(string) {}, func(lb.Key) {}, (func(string))(nil)
	speaker := map[string]func(*Client){
		"LabelledServices":  func(c *Client) { LabelledServices(c, key) },
		"Nodes":             func(c *Client) { Nodes(c, "", name) },
		"AnnouncedPools":    func(c *Client) { AnnouncedPools(c, name, none) },
		"L2Advertisements":  func(c *Client) { L2Advertisements(c, name, none) },
		"BGPPeers":          func(c *Client) { BGPPeers(c, name, none) },
		"BGPAdvertisements": func(c *Client) { BGPAdvertisements(c, name, none) },
		"Communities":       func(c *Client) { Communities(c, name) },
		"BFDProfiles":       func(c *Client) { BFDProfiles(c, name) },
		"DaemonSet":         func(c *Client) { DaemonSet(c, "landfall-system", "landfall-node", name) },
		"Surroundings":      func(c *Client) { Surroundings(c, "landfall-system", name) },
	}
	proxy := map[string]func(*Client){
		"Services":        func(c *Client) { Services(c, "", key) },
		"Slices":          func(c *Client) { Slices(c, key) },
		"Nodes":           func(c *Client) { Nodes(c, "", name) },
		"ServiceNetworks": func(c *Client) { ServiceNetworks(c, name) },
		"PoolRanges":      func(c *Client) { PoolRanges(c, name) },
		"Routers":         func(c *Client) { Routers(c, name) },
		"DaemonSet":       func(c *Client) { DaemonSet(c, "landfall-system", "landfall-node", name) },
	}
	return [2]map[string]func(*Client){speaker, proxy}
}()

// TestAgentsWatchWhatTheProgramsWatch compares the watches of the storm with the source of the programs.
func TestAgentsWatchWhatTheProgramsWatch(t *testing.T) {
	registers := regexp.MustCompile(`\bkube\.([A-Z]\w*)\((?:\w+\.)?client,`)
	for i, program := range []struct {
		folder string
		not    []string // what the chart's defaults leave out
	}{
		{"../../speaker", []string{"Slices"}},  // --gate=endpoints
		{"../../proxy", []string{"GatedPods"}}, // --readiness-gate-timeout
	} {
		files, err := filepath.Glob(program.folder + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range registers.FindAllSubmatch(source, -1) {
				if name := string(match[1]); !slices.Contains(program.not, name) {
					want = append(want, name)
				}
			}
		}
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(registered[i])); !slices.Equal(got, want) {
			t.Errorf("%s: the storm has the watches %v, the program %v", program.folder, got, want)
		}
	}
}

// agents are the clients of a node's speaker and proxy, with the watches that the programs register.
func agents(t testing.TB, api http.RoundTripper) (clients []*Client) {
	t.Helper()
	for _, watches := range registered {
		config := &rest.Config{Host: "http://api", Transport: api, QPS: qps, Burst: burst}
		config.ContentType = runtime.ContentTypeProtobuf
		config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
		httpClient := &http.Client{Transport: api}
		core, err := newKinds(config, httpClient)
		if err != nil {
			t.Fatal(err)
		}
		landfall, err := landfallClient(config, httpClient)
		if err != nil {
			t.Fatal(err)
		}
		c := &Client{log: slog.New(slog.DiscardHandler), core: core, rest: core, landfall: landfall}
		for _, register := range watches {
			register(c)
		}
		clients = append(clients, c)
	}
	return clients
}

// runAgents runs the agents of so many nodes until stop, and returns how many watches they have.
func runAgents(t testing.TB, api http.RoundTripper, nodes int) (watches int, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range nodes {
		for _, c := range agents(t, api) {
			watches += len(c.watches)
			c.nodes = func() int { return nodes }
			group.Go(func() { _ = c.Run(ctx) })
		}
	}
	return watches, func() {
		cancel()
		group.Wait()
	}
}

// peak returns how many of the lists were asked for within the busiest 100 ms.
func peak(lists []time.Duration) (most int) {
	slots := map[int]int{}
	for _, at := range lists {
		slot := int(at / (100 * time.Millisecond))
		slots[slot]++
		most = max(most, slots[slot])
	}
	return most
}

// TestStormOfWatches has the agents of all nodes meet an API server that restarts: each list is asked for
// once, as good as, the nodes of a large cluster do not ask all at once, and those of a small one hardly
// wait. LANDFALL_SCALE_NODES=1000 has as many nodes.
func TestStormOfWatches(t *testing.T) {
	sizes := []int{3, 20}
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_SCALE_NODES")); err == nil {
		sizes = []int{n}
	}
	for _, nodes := range sizes {
		t.Run(strconv.Itoa(nodes), func(t *testing.T) { storm(t, nodes) })
	}
}

func storm(t *testing.T, nodes int) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		api := newStormAPI()
		watches, stop := runAgents(t, api, nodes)
		defer stop()
		report := func(what string) (lists []time.Duration) {
			api.mu.Lock()
			defer api.mu.Unlock()
			t.Logf("| %s | %d nodes | %d lists | %d within 100 ms | last after %.1f s | %d refused connections |", what,
				nodes, len(api.lists), peak(api.lists), api.lists[len(api.lists)-1].Seconds(), api.refused)
			// A watch that begins while the API server goes away lists once more.
			if n := len(api.lists); n < watches || n > watches+max(2, watches/50) {
				t.Errorf("%s: %d lists for %d watches", what, len(api.lists), watches)
			}
			return api.lists
		}
		time.Sleep(10 * time.Second)
		report("all agents start at once")

		for _, away := range []time.Duration{0, 3 * time.Second, time.Minute} {
			api.reset()
			api.stop()
			time.Sleep(away)
			if refused := api.refusals(); away > 0 && refused > 2*watches*(6+int(away/(retryOf(nodes)/2))) {
				t.Errorf("away for %s: %d connections of %d watches", away, refused, watches)
			}
			api.start()
			back := time.Now()
			time.Sleep(20 * time.Second)
			lists := report(fmt.Sprintf("the API server restarts, away for %s", away))
			// 10 ms for each node are 170 lists in 100 ms, give or take what chance brings.
			if most := peak(lists); most > max(250, watches/5) {
				t.Errorf("away for %s: %d of %d lists within 100 ms of one another", away, most, watches)
			}
			if last := api.began.Add(lists[len(lists)-1]).Sub(back); last > retryOf(nodes)+time.Second || away == 0 && nodes == 3 && last > 100*time.Millisecond {
				t.Errorf("away for %s: the last list is asked for %s after the return", away, last)
			}
		}
	})
}

// A network that is away for long enough to end all connections has nobody list anew: nothing of the API server is lost.
func TestContract11ANetworkThatIsAwayHasNobodyList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newStormAPI()
		watches, stop := runAgents(t, api, 3)
		defer stop()
		time.Sleep(10 * time.Second)
		for _, away := range []time.Duration{time.Second, 20 * time.Second, time.Minute} {
			for _, gone := range []error{errors.Join(syscall.EHOSTUNREACH), errors.Join(syscall.ETIMEDOUT)} { // as a dialer has it
				api.reset()
				api.cut(gone)
				time.Sleep(away)
				api.mend()
				time.Sleep(20 * time.Second)
				if lists, watching := api.counts(); lists > 0 || watching != watches {
					t.Errorf("%v for %s: %d lists; %d of %d watch", gone, away, lists, watching, watches)
				}
			}
		}
	})
}

// counts returns how many lists were asked for, and how many watches have gone on.
func (a *stormAPI) counts() (lists, watching int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.lists), a.watching
}

func (a *stormAPI) refusals() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused
}
